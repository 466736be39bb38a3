"""Who comes before whom: parent and depth of every block of an index, and the path down to one of
them at the cost of a few steps however deep it is.

A parent stays as long as it has children, so a path never changes while its last block is there.
The last block of every full `_CHUNK_BLOCKS` of a path keeps that stretch; a path is put together
from stretches and the few blocks behind them. It matters not where in memory blocks lie.
"""

from array import array

ROOT = -1  # the parent of a first block
_ABSENT = -2
_CHUNK_BLOCKS = 64  # blocks


class PathTable:
    def __init__(self, num_blocks: int) -> None:
        self._parent = array("i", [_ABSENT]) * num_blocks
        self._depth = array("i", [0]) * num_blocks
        self._chunks: dict[int, array[int]] = {}  # last block -> its blocks, backwards

    def __len__(self) -> int:
        """All blocks, here or not."""
        return len(self._parent)

    def __contains__(self, block: int) -> bool:
        return self._parent[block] != _ABSENT

    def parent(self, block: int) -> int:
        """ROOT for a first block."""
        return self._parent[block]

    def depth(self, block: int) -> int:
        """Blocks before it."""
        return self._depth[block]

    def add_block(self, block: int, parent: int) -> None:
        self._parent[block] = parent
        self._depth[block] = depth = 0 if parent == ROOT else self._depth[parent] + 1
        if depth % _CHUNK_BLOCKS == _CHUNK_BLOCKS - 1:
            self._chunks[block] = self._walk_to_root(block, _CHUNK_BLOCKS)

    def remove_block(self, block: int) -> int:
        """Its parent."""
        parent, self._parent[block] = self._parent[block], _ABSENT
        self._chunks.pop(block, None)
        return parent

    def path(self, block: int) -> "array[int]":
        """From the first block down to `block`."""
        found = self._walk_to_root(block, (self._depth[block] + 1) % _CHUNK_BLOCKS)
        block = self._parent[found[-1]] if found else block
        while block != ROOT:
            stretch = self._chunks[block]
            found += stretch
            block = self._parent[stretch[-1]]
        found.reverse()
        return found

    def _walk_to_root(self, block: int, count: int) -> "array[int]":
        found, parents = array("i", bytes(4 * count)), self._parent
        for place in range(count):
            found[place] = block
            block = parents[block]
        return found
