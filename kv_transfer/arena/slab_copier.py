"""Copies slabs between arenas and payloads, with their checksums.

Applies the `corrupt` failpoints of tests to what it copies.
"""

import xxhash

from baton.kv.blocks import KVLayout
from baton.process.failpoints import FailpointAction
from baton.types import Ticket
from kv_transfer.arena.arena_slabs import ArenaSlabs, RowIndices
from kv_transfer.core import frames
from kv_transfer.core.handoff_common import is_one_sided
from kv_transfer.core.send_queue import OutgoingWrite
from kv_transfer.core.slabs import SlabRange


class SlabCopier:
    """Copies slabs from and to one node's arena."""

    def __init__(self, arena: memoryview, layout: KVLayout) -> None:
        self.arena_slabs = ArenaSlabs(arena, layout)
        self._block_bytes = layout.block_bytes

    def has_blocks_of(self, ticket: Ticket) -> bool:
        """Whether the ticket's offsets are blocks of this arena."""
        return self.arena_slabs.has_blocks_at(ticket.block_offsets)

    def read_slabs(
        self, write: OutgoingWrite, action: FailpointAction | None = None
    ) -> tuple[memoryview, int]:
        """Copy slabs out of the arena. Returns the payload and its checksum.

        `corrupt` changes the payload after its checksum was taken."""
        payload, checksum = self.arena_slabs.gather_with_checksum(self._source_rows(write))
        return (flip_first_bit(payload) if action is FailpointAction.CORRUPT else payload), checksum

    def copy_slabs(
        self,
        write: OutgoingWrite,
        target: "SlabCopier",
        ticket: Ticket,
        action: FailpointAction | None = None,
    ) -> int:
        """Copy slabs to the ticket's blocks in the arena of `target`. Returns their checksum.

        `corrupt` changes the copy."""
        target_rows = target._slab_rows(ticket, write.slab_range)
        checksum = self.arena_slabs.copy_to(
            self._source_rows(write), target.arena_slabs, target_rows
        )
        if action is FailpointAction.CORRUPT:
            target.arena_slabs.flip_bit(target_rows)
        return checksum

    def write_slabs(self, ticket: Ticket, slab_range: SlabRange, payload: memoryview) -> None:
        """Copy a payload to the ticket's blocks in this arena."""
        self.arena_slabs.scatter_slabs(self._slab_rows(ticket, slab_range), payload)

    def receive_write(
        self,
        ticket: Ticket,
        frame: frames.WriteFrame,
        payload: memoryview | None,
        action: FailpointAction | None,
    ) -> bool:
        """Copy an inline payload into the arena, or read back what a one-sided writer wrote.

        False if the bytes do not have the checksum; an inline payload then has not touched the
        arena."""
        if (
            is_one_sided(ticket.transport) == frame.is_inline
            or (payload is None) == frame.is_inline
        ):
            return False
        if payload is None:
            rows = self._slab_rows(ticket, frame.slab_range)
            if action is FailpointAction.CORRUPT:
                self.arena_slabs.flip_bit(rows)
            return self.arena_slabs.compute_checksum(rows) == frame.checksum
        if action is FailpointAction.CORRUPT:
            payload = flip_first_bit(payload)
        if (
            len(payload) != frame.payload_bytes
            or xxhash.xxh3_64_intdigest(payload) != frame.checksum
        ):
            return False
        self.write_slabs(ticket, frame.slab_range, payload)
        return True

    def _source_rows(self, write: OutgoingWrite) -> RowIndices:
        return self.arena_slabs.slab_rows(write.slab_range, write.source_blocks)

    def _slab_rows(self, ticket: Ticket, slab_range: SlabRange) -> RowIndices:
        first = slab_range.first_block - ticket.first_block
        offsets = ticket.block_offsets[first : first + slab_range.num_blocks]
        return self.arena_slabs.slab_rows(
            slab_range, [offset // self._block_bytes for offset in offsets]
        )


def finish_payload(payload: memoryview, action: FailpointAction | None) -> tuple[memoryview, int]:
    """A payload as it is sent, and its checksum. `corrupt` changes it after that was taken."""
    checksum = xxhash.xxh3_64_intdigest(payload)
    return (flip_first_bit(payload) if action is FailpointAction.CORRUPT else payload), checksum


def flip_first_bit(data: memoryview) -> memoryview:
    """A copy with one bit of its first byte changed, for the `corrupt` failpoint."""
    copy = bytearray(data)
    copy[0] ^= 1
    return memoryview(copy)
