"""What is ready to be sent, and how it is cut into messages."""

from dataclasses import dataclass, replace

from baton.types import BlockIndex
from kv_transfer.core.slabs import Rectangle


@dataclass(frozen=True, slots=True)
class Announced:
    """One layer of logical blocks block .. block + len(source) is final in the arena's blocks `source`."""

    layer: int
    block: int
    source: tuple[BlockIndex, ...]

    @property
    def area(self) -> Rectangle:
        return Rectangle(self.layer, 1, self.block, len(self.source))

    def beyond(self, first: int) -> tuple["Announced", ...]:
        """What of it lies at logical block `first` or after."""
        skip = max(0, first - self.block)
        if skip == 0:
            return (self,)
        return (replace(self, block=first, source=self.source[skip:]),) if skip < len(self.source) else ()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message's slabs, to be read now: every layer of `area` from the same `source` blocks."""

    area: Rectangle
    source: tuple[BlockIndex, ...]


def take(queue: tuple[Announced, ...], slabs: int, layers: int) -> tuple[Outgoing, tuple[Announced, ...]]:
    """Cut a message of up to `slabs` slabs off a queue that is not empty: some blocks of one layer, or several whole
    layers (up to `layers`, 0 is any number) of the same blocks. What is ready goes; nothing is waited for."""
    head = queue[0]
    width = len(head.source)
    if width > slabs:
        rest = replace(head, block=head.block + slabs, source=head.source[slabs:])
        return Outgoing(Rectangle(head.layer, 1, head.block, slabs), head.source[:slabs]), (rest, *queue[1:])
    most = min(layers or slabs, slabs // width, len(queue))
    count = 1
    while count < most and queue[count] == replace(head, layer=head.layer + count):
        count += 1
    return Outgoing(Rectangle(head.layer, count, head.block, width), head.source), queue[count:]
