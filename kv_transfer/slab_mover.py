"""Moves slabs between arenas and payloads, with their checksums, and carries out the failpoints on the way."""

import xxhash

from baton.failpoints import Action
from baton.kv_layout import KVLayout
from baton.types import Ticket
from kv_transfer.core import frames
from kv_transfer.core.ready import Outgoing
from kv_transfer.core.slabs import Rectangle
from kv_transfer.slab_rows import Rows, SlabRows


class SlabMover:
    """One node's arena, seen from the transfer plane."""

    def __init__(self, arena: memoryview, layout: KVLayout) -> None:
        self.slabs = SlabRows(arena, layout)
        self._block_bytes = layout.block_bytes

    def holds(self, ticket: Ticket) -> bool:
        """Whether the ticket's offsets are blocks of this arena."""
        return self.slabs.holds_blocks_at(ticket.offsets)

    def read(self, outgoing: Outgoing, action: Action | None = None) -> tuple[memoryview, int]:
        """Copy slabs out of the arena. Returns (payload, its checksum, which a `corrupt` payload no longer has)."""
        payload = self.slabs.gather(self.slabs.rows(outgoing.area, outgoing.source))
        checksum = xxhash.xxh3_64_intdigest(payload)
        return (flipped(payload) if action is Action.CORRUPT else payload), checksum

    def place(self, ticket: Ticket, area: Rectangle, payload: memoryview) -> None:
        """Copy a payload to the ticket's blocks in this arena."""
        self.slabs.scatter(self._rows(ticket, area), payload)

    def land(self, ticket: Ticket, frame: frames.Write, payload: memoryview | None, action: Action | None) -> bool:
        """Bring an admitted Write's bytes into the arena, or read back those that its writer put there. False if they
        are not what the checksum says; an inline payload has then not touched the arena."""
        one_sided = ticket.transport == "shm"
        if one_sided == frame.inline or (payload is None) == frame.inline:
            return False
        if payload is None:
            rows = self._rows(ticket, frame.area)
            if action is Action.CORRUPT:
                self.slabs.flip_bit(rows)
            return bool(xxhash.xxh3_64_intdigest(self.slabs.gather(rows)) == frame.checksum)
        if action is Action.CORRUPT:
            payload = flipped(payload)
        if len(payload) != frame.size or xxhash.xxh3_64_intdigest(payload) != frame.checksum:
            return False
        self.place(ticket, frame.area, payload)
        return True

    def _rows(self, ticket: Ticket, area: Rectangle) -> Rows:
        first = area.block - ticket.first_block
        offsets = ticket.offsets[first : first + area.blocks]
        return self.slabs.rows(area, [offset // self._block_bytes for offset in offsets])


def flipped(data: memoryview) -> memoryview:
    """A copy with one bit of its first byte changed: the `corrupt` failpoint."""
    copy = bytearray(data)
    copy[0] ^= 1
    return memoryview(copy)
