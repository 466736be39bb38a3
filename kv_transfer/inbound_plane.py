"""Decode's side of the transfer plane, as the node calls it. The work is done on a thread of its own, by `Landings`."""

from collections.abc import Callable

from baton.clock import Clock, steady
from baton.errors import BatonError, HandoffFailed
from baton.failpoints import FAILPOINTS, Failpoints
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.core.events import InboundEvent, Lost
from kv_transfer.core.landing import ArenaShape
from kv_transfer.landings import Landings
from kv_transfer.plane_thread import PlaneThread, end_process
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_mover import SlabMover
from kv_transfer.transport import DecodeLink


class InboundTransfer:
    """Implements plane.InboundPlane."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        link: DecodeLink,
        fences: ArenaFences | None,
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[InboundEvent], None],
        clock: Clock = steady,
        failpoints: Failpoints = FAILPOINTS,
        on_defect: Callable[[], None] = end_process,
    ) -> None:
        """`fences` are the arena's, None if it is no segment: then no writer may be one-sided. Link and fences are the
        plane's own from now on."""
        self._mover = SlabMover(arena, layout)
        self._link = link
        self._fences = fences
        self._host_id = host_id
        self._settings = settings
        self._emit = emit
        self._landings = Landings(
            mover=self._mover,
            shape=ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes),
            link=link,
            fences=fences,
            settings=settings,
            incarnation=incarnation,
            emit=emit,
            clock=clock,
            failpoints=failpoints,
        )
        self._thread = PlaneThread("transfer-inbound", self._landings, clock, settings.close_timeout, on_defect)
        self._landings.catch_up = self._thread.run_posted
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post(lambda: self._landings.rejoin(incarnation))

    def choose_transport(self, writer_host_id: str) -> str:
        if self._settings.transport != "auto":
            return self._settings.transport
        same_host = writer_host_id == self._host_id and writer_host_id not in self._landings.unmappable_hosts
        return "shm" if same_host and self._fences is not None else "zmq"

    def mint_fence(self) -> int:
        return self._fences.mint() if self._fences is not None else 0

    def grant(self, ticket: Ticket) -> None:
        """Raises ValueError for offsets that are no blocks of the arena."""
        two_sided = ticket.transport != "shm"
        if not self._mover.holds(ticket) or not (two_sided or self._fences):
            raise ValueError(f"ticket {ticket.id} ({ticket.transport}) names what are no blocks of this arena")
        if not self._thread.post(lambda: self._landings.grant(ticket)):
            self._emit(Lost(ticket.id, HandoffFailed("the transfer plane is closed"), fenced=two_sided))

    def commit(self, ticket: TicketId) -> None:
        self._thread.post(lambda: self._landings.commit(ticket))

    def revoke(self, ticket: TicketId, error: BatonError) -> None:
        self._thread.post(lambda: self._landings.revoke(ticket, error))

    def peer_gone(self, writer: Incarnation) -> None:
        self._thread.post(lambda: self._landings.peer_gone(writer))

    def counters(self) -> dict[str, float]:
        return {**self._landings.counters, **self._link.counters()}

    def close(self) -> None:
        self._thread.close()
