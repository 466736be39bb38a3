"""Decode's arena as a writer on the same host sees it: mapped, and locked byte by byte while written."""

from collections.abc import Collection
from pathlib import Path

from baton.addressing import AddressSpace
from baton.errors import LayoutMismatch, PeerGone, Unmappable
from baton.fence import WriterFences
from baton.kv_layout import KVLayout
from baton.types import Ticket
from kv_transfer.slab_rows import SlabRows


class PeerArena:
    def __init__(self, space: AddressSpace, folder: Path, segment: str, layout: KVLayout) -> None:
        """Raises Unmappable when the segment is not there or does not fit."""
        try:
            self.fences = WriterFences(folder, segment)
            self.slabs = SlabRows(space.attach(segment), layout)
        except (PeerGone, LayoutMismatch) as error:
            raise Unmappable(error.message) from error
        self._space = space
        self._segment = segment

    def close(self) -> None:
        """No write may be in progress."""
        self.fences.close()
        self._space.detach(self._segment)


class TicketLock:
    """The machine's WriterLock: one ticket's byte of the peer's fence file."""

    def __init__(self, arena: PeerArena, ticket: Ticket) -> None:
        self._fences = arena.fences
        self._byte = ticket.fence

    def take(self) -> bool:
        return self._fences.take(self._byte)

    def drop(self) -> None:
        self._fences.drop(self._byte)


class PeerArenas:
    """The peers' arenas that a plane has mapped, by segment name."""

    def __init__(self, folder: Path, layout: KVLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._space: AddressSpace | None = None
        self._arenas: dict[str, PeerArena] = {}

    def get(self, segment: str) -> PeerArena:
        """Raises Unmappable."""
        if self._space is None:
            self._space = AddressSpace(self._layout.block_bytes, self._folder)
        if segment not in self._arenas:
            self._arenas[segment] = PeerArena(self._space, self._folder, segment, self._layout)
        return self._arenas[segment]

    def keep(self, used: Collection[PeerArena | None]) -> None:
        """Let go of all but the `used` ones. What is needed again is mapped again."""
        for segment in [segment for segment, arena in self._arenas.items() if arena not in used]:
            self._arenas.pop(segment).close()

    def close(self) -> None:
        self.keep(())
        if self._space is not None:
            self._space.close()
            self._space = None
