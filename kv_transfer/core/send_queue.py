"""Slabs that are ready to be sent, and how they are cut into messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from baton.kv.device_event import DeviceEvent
from baton.types import BlockIndex
from kv_transfer.core.frames import INITIAL_WINDOW_BYTES
from kv_transfer.core.slabs import SlabRange


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSettings:
    """How a hand-off is cut into messages, and how long it waits for answers."""

    max_payload_bytes: int  # of one message
    layers_per_message: int  # 0: as many layers as are ready and fit
    window_bytes: int  # asked for as credit: may be sent and not yet landed
    renew_interval: float  # seconds between two Renew frames
    initial_window_bytes: int = INITIAL_WINDOW_BYTES  # before decode's first Credit
    answer_timeout: float  # seconds without an answer after which the hand-off aborts


@dataclass(eq=False, slots=True)
class ReadyGate:
    """What slabs wait for that are announced while a device still computes them.

    The device orders its copies after the events itself, so that nothing has to be launched any
    more once the slabs are final.
    """

    layer_ends: Mapping[int, DeviceEvent]  # a layer is final after its event
    passed_at: float | None = None  # on the plane's clock
    on_passed: list[Callable[[], None]] = field(default_factory=list)

    def mark_passed(self, now: float) -> None:
        """All layers behind the gate are final. Called by the thread that announced them."""
        self.passed_at = now
        for call in self.on_passed:
            call()


@dataclass(frozen=True, slots=True)
class ReadySlabs:
    """One layer of consecutive logical blocks is final in the arena, or will be behind a gate."""

    layer: int
    first_block: int  # logical
    source_blocks: tuple[BlockIndex, ...]  # the arena's blocks that hold them, in order
    gate: ReadyGate | None = None

    @property
    def slab_range(self) -> SlabRange:
        return SlabRange(self.layer, 1, self.first_block, len(self.source_blocks))

    @property
    def open_gate(self) -> ReadyGate | None:
        """The gate, if it has not passed."""
        return self.gate if self.gate is not None and self.gate.passed_at is None else None

    def can_follow(self, head: "ReadySlabs") -> bool:
        """Whether it can travel in a message that begins with `head`."""
        return (
            self.first_block == head.first_block
            and self.source_blocks == head.source_blocks
            and self.open_gate is head.open_gate
        )

    def clip_before(self, first: int) -> tuple["ReadySlabs", ...]:
        """The part of the announcement from logical block `first` on; () if there is none."""
        skip = max(0, first - self.first_block)
        if skip == 0:
            return (self,)
        return (
            (replace(self, first_block=first, source_blocks=self.source_blocks[skip:]),)
            if skip < len(self.source_blocks)
            else ()
        )


@dataclass(frozen=True, slots=True)
class OutgoingWrite:
    """The slabs of one message, to be read now or, by a device, after the events of a gate."""

    slab_range: SlabRange
    source_blocks: tuple[BlockIndex, ...]  # the same blocks of the arena for every layer
    gate: ReadyGate | None = None  # before which a device must not read them

    @property
    def layer_ends(self) -> tuple[DeviceEvent, ...]:
        """The event of each layer; () if all are final."""
        if self.gate is None:
            return ()
        return tuple(self.gate.layer_ends[layer] for layer in self.slab_range.layers)


def split_next_write(
    queue: tuple[ReadySlabs, ...], max_slabs: int, max_layers: int
) -> tuple[OutgoingWrite, tuple[ReadySlabs, ...]]:
    """Cut the slabs of one message off a queue that is not empty. Returns them and the rest.

    A message has some blocks of one layer, or several whole layers of the same blocks: at most
    `max_slabs` slabs and `max_layers` layers (0: any number). It never waits for more slabs.
    """
    head = queue[0]
    num_blocks = len(head.source_blocks)
    if num_blocks > max_slabs:
        first, later = head.source_blocks[:max_slabs], head.source_blocks[max_slabs:]
        slab_range = SlabRange(head.layer, 1, head.first_block, max_slabs)
        write = OutgoingWrite(slab_range, first, head.open_gate)
        remaining = replace(head, first_block=head.first_block + max_slabs, source_blocks=later)
        return write, (remaining, *queue[1:])
    limit = min(max_layers or max_slabs, max_slabs // num_blocks, len(queue))
    layers = 1
    while (
        layers < limit
        and queue[layers].layer == head.layer + layers
        and queue[layers].can_follow(head)
    ):
        layers += 1
    slab_range = SlabRange(head.layer, layers, head.first_block, num_blocks)
    return OutgoingWrite(slab_range, head.source_blocks, head.open_gate), queue[layers:]
