"""Parent and depth of every block of an index, and fast construction of the path down to a block.

A parent stays in the index as long as it has children, so a path does not change while its last
block is there. The last block of every `_CHUNK_BLOCKS` blocks of a path stores that chunk; a path
is put together from chunks and the few blocks after the last chunk.
"""

from array import array

ROOT = -1  # the parent of a first block
_ABSENT = -2
_CHUNK_BLOCKS = 64


class PathTable:
    def __init__(self, num_blocks: int) -> None:
        self._parent = array("i", [_ABSENT]) * num_blocks
        self._depth = array("i", [0]) * num_blocks
        self._chunks: dict[int, array[int]] = {}  # by last block: the chunk, last block first

    def __len__(self) -> int:
        """Return the number of blocks, including those that are not in the index."""
        return len(self._parent)

    def __contains__(self, block: int) -> bool:
        return self._parent[block] != _ABSENT

    def parent(self, block: int) -> int:
        """Return the block before `block` in its prompt; ROOT for a first block."""
        return self._parent[block]

    def depth(self, block: int) -> int:
        """Return how many blocks come before `block` in its prompt."""
        return self._depth[block]

    def add_block(self, block: int, parent: int) -> None:
        self._parent[block] = parent
        self._depth[block] = depth = 0 if parent == ROOT else self._depth[parent] + 1
        if depth % _CHUNK_BLOCKS == _CHUNK_BLOCKS - 1:
            self._chunks[block] = self._walk_up(block, _CHUNK_BLOCKS)

    def remove_block(self, block: int) -> int:
        """Remove a block; returns its parent."""
        parent, self._parent[block] = self._parent[block], _ABSENT
        self._chunks.pop(block, None)
        return parent

    def path(self, block: int) -> "array[int]":
        """Return the blocks of the prompt that ends with `block`, first to last."""
        path = self._walk_up(block, (self._depth[block] + 1) % _CHUNK_BLOCKS)
        block = self._parent[path[-1]] if path else block
        while block != ROOT:
            chunk = self._chunks[block]
            path += chunk
            block = self._parent[chunk[-1]]
        path.reverse()
        return path

    def _walk_up(self, block: int, count: int) -> "array[int]":
        """Return `count` blocks: `block`, its parent, its parent's parent and so on."""
        walked, parents = array("i", bytes(4 * count)), self._parent
        for position in range(count):
            walked[position] = block
            block = parents[block]
        return walked
