"""Decode's arena as a one-sided writer sees it: mapped here, and locked while it is written."""

from pathlib import Path

from baton.errors import ConfigError, LayoutMismatch, PeerUnreachable, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.fence import WriterFences
from baton.types import Incarnation, Ticket
from kv_transfer.arena.slab_copier import SlabCopier


class PeerArena:
    """The arena of one decode node, mapped into this process."""

    def __init__(
        self, space: BlockAddressSpace, folder: Path, segment: str, layout: KVLayout
    ) -> None:
        """Raises PeerUnreachable or LayoutMismatch when the segment is missing or does not fit."""
        self.fences = WriterFences(folder, segment)
        try:
            self.copier = SlabCopier(space.attach_segment(segment), layout)
        except Exception:
            self.fences.close()
            raise
        self.owner_incarnation = Incarnation("")
        self.writes_in_flight = 0  # whose slabs a device reads first
        self.is_owner_gone = False


class TicketLock:
    """The WriterLock of a ticket: its byte of the peer's fence file."""

    def __init__(self, arena: PeerArena, ticket: Ticket) -> None:
        self._fences = arena.fences
        self._byte = ticket.fence_byte

    def try_acquire(self) -> bool:
        return self._fences.try_lock_byte(self._byte)

    def release(self) -> None:
        self._fences.unlock_byte(self._byte)


class PeerArenas:
    """The arenas of peers that this plane has mapped, by segment name."""

    def __init__(self, folder: Path, layout: KVLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._space: BlockAddressSpace | None = None
        self._arenas: dict[str, PeerArena] = {}

    def get(self, ticket: Ticket) -> PeerArena:
        """The arena that a ticket names. Raises UnmappableSegment if there is no such arena."""
        segment = ticket.segment
        if segment.incarnation != ticket.decode_peer.incarnation:
            raise UnmappableSegment(
                f"segment {segment.name} is of incarnation {segment.incarnation}, "
                "not of the ticket's"
            )
        try:
            arena = self._arenas.get(segment.name) or self._map(segment.name)
        except (PeerUnreachable, LayoutMismatch, ConfigError) as error:
            raise UnmappableSegment(error.message) from error
        if not arena.copier.has_blocks_of(ticket):
            raise UnmappableSegment(
                f"segment {segment.name} has no such blocks as ticket {ticket.id} names"
            )
        arena.owner_incarnation, arena.is_owner_gone = segment.incarnation, False
        return arena

    def _map(self, segment: str) -> PeerArena:
        if self._space is None:
            self._space = BlockAddressSpace(self._layout.block_bytes, self._folder)
        arena = self._arenas[segment] = PeerArena(self._space, self._folder, segment, self._layout)
        return arena

    def unmap_peer(self, owner: Incarnation) -> None:
        """Unmap the arenas of a peer that is gone, once nothing is being written to them."""
        for arena in self._arenas.values():
            arena.is_owner_gone |= arena.owner_incarnation == owner
        self._unmap_unused()

    def end_write(self, arena: PeerArena) -> None:
        """A write of `writes_in_flight` has ended, and has released its ticket's byte."""
        arena.writes_in_flight -= 1
        self._unmap_unused()

    def _unmap_unused(self) -> None:
        for segment, arena in list(self._arenas.items()):
            if arena.is_owner_gone and not arena.writes_in_flight:
                self._arenas.pop(segment).fences.close()

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.fences.close()
        self._arenas.clear()
