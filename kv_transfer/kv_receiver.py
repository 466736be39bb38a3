"""Decode's side of the transfer plane, as a node calls it."""

from collections.abc import Callable

from baton.errors import BatonError, HandoffFailed
from baton.kv.blocks import KVLayout
from baton.process.clock import Clock, monotonic_clock
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.arena.slab_copier import SlabCopier
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.handoff_common import CUDA_IPC, ArenaShape, is_one_sided
from kv_transfer.device.arena_export import export_device
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.plane import InboundEvent, InboundLost
from kv_transfer.plane_threads import PlaneThread, exit_process
from kv_transfer.receiver_loop import ReceiverLoop
from kv_transfer.transports.links import DecodeLink


class KVReceiver:
    """Receives KV from writers: decode's InboundPlane, safe to call from any thread."""

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
        clock: Clock = monotonic_clock,
        failpoints: Failpoints = FAILPOINTS,
        on_internal_error: Callable[[], None] = exit_process,
        device: TransferDevice | None = None,
    ) -> None:
        """The plane closes `link` and `fences`.

        `fences` are the arena's, None if it is not a segment: then no writer may be one-sided.
        `device` is the memory that the node computes in, if peers may write to it."""
        self._device, self._export = device, export_device(device, fences)
        self._copier, self._block_bytes = SlabCopier(arena, layout), layout.block_bytes
        self._link, self._fences = link, fences
        self._host_id = host_id
        self._settings = settings
        self._emit = emit
        self._loop = ReceiverLoop(
            copier=self._copier,
            shape=ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes),
            link=link,
            fences=fences,
            settings=settings,
            incarnation=incarnation,
            emit=emit,
            clock=clock,
            failpoints=failpoints,
            device=device,
        )
        self._thread = PlaneThread(
            "transfer-inbound", self._loop, clock, settings.close_timeout, on_internal_error
        )
        self._loop.run_posted_commands = self._thread.run_posted_commands
        self._loop.post_command = self._thread.post_command
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.rejoin(incarnation))

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        setting = self._settings.transport
        is_forced = setting == CUDA_IPC and writer_endpoint is None and self._device is not None
        if is_forced or setting not in ("auto", CUDA_IPC):
            return setting
        is_same_host = writer_host_id == self._host_id and self._fences is not None
        landings = self._loop.landings
        if landings is not None and landings.can_write(is_same_host, writer_endpoint or ""):
            return CUDA_IPC
        is_mappable = is_same_host and writer_host_id not in self._loop.unmappable_hosts
        return "shm" if is_mappable else "zmq"

    def allocate_fence_byte(self) -> int:
        return self._fences.allocate_byte() if self._fences is not None else 0

    def grant_ticket(self, ticket: Ticket) -> None:
        """Accept writes under `ticket`. Raises ValueError for blocks that the arena lacks."""
        two_sided = not is_one_sided(ticket.transport)
        device = self._device if ticket.transport == CUDA_IPC else None
        if (
            not self._copier.has_blocks_of(ticket)
            or not (two_sided or self._fences)
            or (ticket.transport == CUDA_IPC and device is None)
        ):
            raise ValueError(
                f"ticket {ticket.id} ({ticket.transport}) names blocks that are not in this arena"
            )
        blocks = [offset // self._block_bytes for offset in ticket.block_offsets]
        steps = None if device is None else device.mark_queued_work(blocks)
        if not self._thread.post_command(lambda: self._loop.grant_ticket(ticket, steps)):
            self._emit(
                InboundLost(
                    ticket.id, HandoffFailed("the transfer plane is closed"), is_fenced=two_sided
                )
            )

    def commit_ticket(self, ticket: TicketId) -> None:
        self._thread.post_command(lambda: self._loop.commit_ticket(ticket))

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        """Withdraw a writer's permission to write KV blocks here, for the reason of `error`."""
        self._thread.post_command(lambda: self._loop.revoke_ticket(ticket, error))

    def on_peer_gone(self, writer: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.on_peer_gone(writer))

    def counters(self) -> dict[str, float]:
        return {**self._loop.counters, **self._link.counters()}

    def close(self) -> None:
        self._thread.close()
        if self._export is not None:
            self._export.unlink(missing_ok=True)
