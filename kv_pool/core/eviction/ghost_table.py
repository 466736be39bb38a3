"""Ghosts: what is remembered of evicted blocks, so that policies learn from evictions too."""

from array import array
from dataclasses import dataclass

_GHOSTS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True)
class GhostEntry:
    """What is remembered of one evicted block."""

    reuse_class: int  # class of the block when it was evicted
    use_count: int
    last_use: float  # seconds


class GhostTable:
    """About four times as many evicted blocks as the tier has, in a direct-mapped table.

    It takes 11 bytes per entry; a new ghost overwrites the one that maps to the same entry.
    """

    def __init__(self, num_blocks: int) -> None:
        num_entries = 1 << (num_blocks * _GHOSTS_PER_BLOCK - 1).bit_length()
        self._mask = num_entries - 1
        self._tags = array("I", [0]) * num_entries  # 0: empty
        self._last_use = array("f", [0.0]) * num_entries
        self._uses = array("H", [0]) * num_entries
        self._reuse_classes = bytearray(num_entries)

    def add_ghost(self, key: int, ghost: GhostEntry) -> None:
        entry = key & self._mask
        self._tags[entry] = key >> 32 or 1
        self._reuse_classes[entry], self._uses[entry] = (
            ghost.reuse_class,
            min(ghost.use_count, 0xFFFF),
        )
        self._last_use[entry] = ghost.last_use

    def pop_ghost(self, key: int) -> GhostEntry | None:
        """Remove and return the ghost of a block; None if there is none."""
        entry = key & self._mask
        if self._tags[entry] != (key >> 32 or 1):
            return None
        self._tags[entry] = 0
        return GhostEntry(self._reuse_classes[entry], self._uses[entry], self._last_use[entry])
