"""Prefill's side of the transfer plane, as a node calls it."""

from collections.abc import Callable, Sequence

from baton.errors import BatonError, HandoffFailed
from baton.kv.blocks import KVLayout
from baton.process.clock import Clock, monotonic_clock
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.send_queue import ReadyGate, ReadySlabs
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.device.writer_process import name_writer
from kv_transfer.layer_waiter import LayerWaiter
from kv_transfer.plane import LinkCost, OutboundAborted, OutboundEvent, SealInfo
from kv_transfer.plane_threads import PlaneThread, exit_process
from kv_transfer.sender_loop import HandoffInput, SenderLoop
from kv_transfer.slab_writers import SlabWriters
from kv_transfer.transports.links import PeerLinks


class KVSender:
    """Sends KV to decode nodes: prefill's OutboundPlane, safe to call from any thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        links: PeerLinks,
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[OutboundEvent], None],
        clock: Clock = monotonic_clock,
        failpoints: Failpoints = FAILPOINTS,
        on_internal_error: Callable[[], None] = exit_process,
        device: TransferDevice | None = None,
    ) -> None:
        """The plane closes `links`.

        `device` is the memory that slabs are read in, if it is not `arena`."""
        self._layout = layout
        self._emit = emit
        self._clock = clock
        self._device = device
        writers = SlabWriters(arena, layout, settings, device)
        self._num_blocks = writers.num_blocks
        self._loop = SenderLoop(
            writers=writers,
            links=links,
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
        writers.post_command = self._thread.post_command
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """What tells decode that a device writes; else empty, because a writer is not dialled."""
        return "" if self._device is None else name_writer(self._device.writer_name)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post_command(lambda: self._loop.rejoin(incarnation))

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        blocks = self._layout.count_blocks(num_tokens)
        if not self._thread.post_command(lambda: self._loop.open_handoff(key, blocks)):
            self._emit(OutboundAborted(key, HandoffFailed("the transfer plane is closed")))

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self._thread.post_command(lambda: self._loop.set_ticket(key, ticket))

    @property
    def link_cost(self) -> LinkCost:
        return self._loop.link_cost

    def announce_layer(
        self,
        key: AttemptKey,
        layer: int,
        first: int,
        source: Sequence[BlockIndex],
        num_layers: int = 1,
        gate: ReadyGate | None = None,
    ) -> None:
        """Queue layers to be sent. Raises ValueError for blocks that the arena lacks."""
        blocks, now = tuple(source), self._clock()
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._num_blocks:
            raise ValueError(
                f"{key} announces blocks that an arena of {self._num_blocks} does not have"
            )
        layers = range(layer, layer + num_layers)
        ready = [ReadySlabs(each, first, blocks, gate) for each in layers]
        self._post_input(
            key,
            lambda machine: [
                output for slabs in ready for output in machine.announce_slabs(slabs, now)
            ],
        )
        if gate is not None:
            gate.on_passed.append(
                lambda: self._post_input(key, lambda machine: machine.on_gate_passed(gate))
            )

    def _post_input(self, key: AttemptKey, call: HandoffInput) -> None:
        self._thread.post_command(lambda: self._loop.apply_input(key, call))

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        self._post_input(key, lambda machine: machine.seal(info, self._clock()))

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        self._post_input(key, lambda machine: machine.abort(error))

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
