"""Prefill's side of the transfer plane, as the node calls it.

`SenderLoop` does the work, on the plane's own thread.
"""

from collections.abc import Callable, Mapping, Sequence

from baton.errors import BatonError, HandoffFailed
from baton.kv.kv_layout import KVLayout
from baton.process.clock import Clock, monotonic_clock
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_transfer.arena.slab_copier import SlabCopier
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.events import OutboundAborted, OutboundEvent, SealInfo
from kv_transfer.core.handoff_common import ArenaShape
from kv_transfer.core.send_queue import ReadySlabs
from kv_transfer.plane_thread import PlaneThread, exit_process
from kv_transfer.sender_loop import LayerWaiter, SenderLoop
from kv_transfer.transports.links import PeerLinks, TransferDialer
from kv_transfer.transports.shm_arena import PeerArenas


class KVSender:
    """Sends KV to decode nodes: prefill's OutboundPlane, safe to call from any thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        dialers: Mapping[str, TransferDialer],
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[OutboundEvent], None],
        clock: Clock = monotonic_clock,
        failpoints: Failpoints = FAILPOINTS,
        on_internal_error: Callable[[], None] = exit_process,
    ) -> None:
        """`dialers` by the scheme of the endpoints that they dial. The plane closes them."""
        copier = SlabCopier(arena, layout)
        self._num_blocks = copier.arena_slabs.num_blocks
        self._layout = layout
        self._emit = emit
        self._clock = clock
        self._loop = SenderLoop(
            copier=copier,
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
        self._thread = PlaneThread(
            "transfer-outbound", self._loop, clock, settings.close_timeout, on_internal_error
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Empty: a writer dials and is never dialled."""
        return ""

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.rejoin(incarnation))

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        blocks = self._layout.count_blocks(num_tokens)
        if not self._thread.post_command(lambda: self._loop.open_handoff(key, blocks)):
            self._emit(OutboundAborted(key, HandoffFailed("the transfer plane is closed")))

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self._thread.post_command(lambda: self._loop.set_ticket(key, ticket))

    def announce_layer(
        self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]
    ) -> None:
        """Queue a computed layer to be sent. Raises ValueError for blocks that the arena lacks."""
        ready, now = ReadySlabs(layer, first, tuple(source)), self._clock()
        if (
            ready.source_blocks
            and not 0 <= min(ready.source_blocks) <= max(ready.source_blocks) < self._num_blocks
        ):
            raise ValueError(
                f"{key} announces blocks that an arena of {self._num_blocks} does not have"
            )
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.announce_slabs(ready, now))
        )

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.seal(info, self._clock()))
        )

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        self._thread.post_command(
            lambda: self._loop.apply_input(key, lambda machine: machine.abort(error))
        )

    def on_peer_gone(self, decode: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.on_peer_gone(decode))

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        waiter = LayerWaiter(layer)
        if not self._thread.post_command(lambda: self._loop.add_layer_waiter(key, waiter)):
            return False
        waiter.done.wait(timeout)
        return waiter.has_landed

    def counters(self) -> dict[str, float]:
        return dict(self._loop.counters)

    def close(self) -> None:
        self._thread.close()
