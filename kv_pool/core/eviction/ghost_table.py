"""What is still known of blocks that were evicted: without it a policy would learn only from what
it keeps."""

from array import array
from dataclasses import dataclass

_GHOSTS_PER_BLOCK = 4


@dataclass(frozen=True, slots=True)
class GhostEntry:
    reuse_class: int  # the class that it was in
    use_count: int
    last_use: float


class GhostTable:
    """The last four or so times as many evicted blocks as the tier has, in a direct-mapped table of
    11 bytes a place: a newcomer overwrites whoever has its place."""

    def __init__(self, num_blocks: int) -> None:
        places = 1 << (num_blocks * _GHOSTS_PER_BLOCK - 1).bit_length()
        self._mask = places - 1
        self._tags = array("I", [0]) * places  # 0: empty
        self._last_use = array("f", [0.0]) * places
        self._uses = array("H", [0]) * places
        self._reuse_classes = bytearray(places)

    def add_ghost(self, key: int, ghost: GhostEntry) -> None:
        place = key & self._mask
        self._tags[place] = key >> 32 or 1
        self._reuse_classes[place], self._uses[place] = (
            ghost.reuse_class,
            min(ghost.use_count, 0xFFFF),
        )
        self._last_use[place] = ghost.last_use

    def pop_ghost(self, key: int) -> GhostEntry | None:
        """What was known of it; it is no ghost any more."""
        place = key & self._mask
        if self._tags[place] != (key >> 32 or 1):
            return None
        self._tags[place] = 0
        return GhostEntry(self._reuse_classes[place], self._uses[place], self._last_use[place])
