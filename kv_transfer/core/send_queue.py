"""What is ready to be sent, and how it is cut into messages."""

from dataclasses import dataclass, replace

from baton.types import BlockIndex
from kv_transfer.core.slabs import SlabRange


@dataclass(frozen=True, slots=True)
class SendSettings:
    """How a hand-off is cut into messages, and how long it waits for answers."""

    max_payload_bytes: int  # of one message
    layers_per_message: int  # 0: as many layers as are ready and fit
    window_bytes: int  # asked for as credit: may be sent and not yet landed
    renew_interval: float  # seconds between two Renew frames
    answer_timeout: float  # seconds without an answer after which the hand-off aborts


@dataclass(frozen=True, slots=True)
class ReadySlabs:
    """One layer of logical blocks block .. block + len(source) is final in the arena's blocks
    `source_blocks`."""

    layer: int
    first_block: int
    source_blocks: tuple[BlockIndex, ...]

    @property
    def slab_range(self) -> SlabRange:
        return SlabRange(self.layer, 1, self.first_block, len(self.source_blocks))

    def clip_before(self, first: int) -> tuple["ReadySlabs", ...]:
        """What of it lies at logical block `first` or after."""
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
    """One message's slabs, to be read now: every layer of `slab_range` from the same
    `source_blocks` blocks."""

    slab_range: SlabRange
    source_blocks: tuple[BlockIndex, ...]


def split_next_write(
    queue: tuple[ReadySlabs, ...], slabs: int, layers: int
) -> tuple[OutgoingWrite, tuple[ReadySlabs, ...]]:
    """Cut a message of up to `slabs` slabs off a queue that is not empty: some blocks of one layer,
    or several whole layers (up to `layers`, 0 is any number) of the same blocks. What is ready
    goes; nothing is waited for."""
    head = queue[0]
    width = len(head.source_blocks)
    if width > slabs:
        rest = replace(
            head, first_block=head.first_block + slabs, source_blocks=head.source_blocks[slabs:]
        )
        return OutgoingWrite(
            SlabRange(head.layer, 1, head.first_block, slabs), head.source_blocks[:slabs]
        ), (rest, *queue[1:])
    most = min(layers or slabs, slabs // width, len(queue))
    count = 1
    while count < most and queue[count] == replace(head, layer=head.layer + count):
        count += 1
    return OutgoingWrite(
        SlabRange(head.layer, count, head.first_block, width), head.source_blocks
    ), queue[count:]
