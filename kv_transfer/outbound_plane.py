"""Prefill's side of the transfer plane, as the node calls it. The work is done on a thread of its own, by
`Departures`."""

from collections.abc import Callable, Mapping, Sequence

from baton.clock import Clock, steady
from baton.errors import BatonError, HandoffFailed
from baton.failpoints import FAILPOINTS, Failpoints
from baton.kv_layout import KVLayout
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_transfer.core.events import Aborted, OutboundEvent, SealInfo
from kv_transfer.core.landing import ArenaShape
from kv_transfer.core.ready import Announced
from kv_transfer.departures import Departures, Waiter
from kv_transfer.peer_arena import PeerArenas
from kv_transfer.peer_links import PeerLinks
from kv_transfer.plane_thread import PlaneThread, end_process
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_mover import SlabMover
from kv_transfer.transport import Dialer


class OutboundTransfer:
    """Implements plane.OutboundPlane."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        dialers: Mapping[str, Dialer],
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[OutboundEvent], None],
        clock: Clock = steady,
        failpoints: Failpoints = FAILPOINTS,
        on_defect: Callable[[], None] = end_process,
    ) -> None:
        """`dialers` by the scheme of the endpoints that they dial; they are the plane's own from now on."""
        mover = SlabMover(arena, layout)
        self._num_blocks = mover.slabs.num_blocks
        self._layout = layout
        self._emit = emit
        self._clock = clock
        self._departures = Departures(
            mover=mover,
            shape=ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes),
            links=PeerLinks(dialers),
            arenas=PeerArenas(settings.segment_folder, layout),
            host_id=host_id,
            settings=settings,
            incarnation=incarnation,
            emit=emit,
            clock=clock,
            failpoints=failpoints,
        )
        self._thread = PlaneThread("transfer-outbound", self._departures, clock, settings.close_timeout, on_defect)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Empty: a writer dials and is never dialled."""
        return ""

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post(lambda: self._departures.rejoin(incarnation))

    def open(self, key: AttemptKey, num_tokens: int) -> None:
        blocks = self._layout.blocks_for(num_tokens)
        if not self._thread.post(lambda: self._departures.open(key, blocks)):
            self._emit(Aborted(key, HandoffFailed("the transfer plane is closed")))

    def ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self._thread.post(lambda: self._departures.ticket(key, ticket))

    def layer_ready(self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]) -> None:
        """Raises ValueError for blocks that the arena does not have."""
        ready, now = Announced(layer, first, tuple(source)), self._clock()
        if ready.source and not 0 <= min(ready.source) <= max(ready.source) < self._num_blocks:
            raise ValueError(f"{key} announces blocks that an arena of {self._num_blocks} does not have")
        self._thread.post(lambda: self._departures.tell(key, lambda machine: machine.announce(ready, now)))

    def seal(self, key: AttemptKey, info: SealInfo) -> None:
        self._thread.post(lambda: self._departures.tell(key, lambda machine: machine.seal(info, self._clock())))

    def abort(self, key: AttemptKey, error: BatonError) -> None:
        self._thread.post(lambda: self._departures.tell(key, lambda machine: machine.abort(error)))

    def peer_gone(self, decode: Incarnation) -> None:
        self._thread.post(lambda: self._departures.peer_gone(decode))

    def wait_landed(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        waiter = Waiter(layer)
        if not self._thread.post(lambda: self._departures.wait(key, waiter)):
            return False
        waiter.done.wait(timeout)
        return waiter.landed

    def counters(self) -> dict[str, float]:
        return dict(self._departures.counters)

    def close(self) -> None:
        self._thread.close()
