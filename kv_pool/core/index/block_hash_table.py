"""The names of an index's blocks, and which block has which: an open-addressing hash table of block
numbers (Knuth, The Art of Computer Programming 3, 6.4: linear probing, and algorithm R for
removal). What is hashed and compared is the first 8 bytes of a name, which are as good as random
already. About 40 bytes a block, names included; a dictionary of integers takes 120 besides.
"""

from array import array

from baton.kv.block_hash import HASH_BYTES

_KEY_BYTES = 8
_EMPTY = -1


class BlockHashTable:
    """Of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        places = 1 << (num_blocks * 3 // 2).bit_length()  # filled to two thirds at most
        self._mask = places - 1
        self._slots = array("i", [_EMPTY]) * places
        self._hashes = bytearray(num_blocks * HASH_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def block_hash(self, block: int) -> bytes:
        """The last one that it got."""
        return bytes(self._hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def find_block(self, name: bytes) -> int | None:
        """The block whose name begins with the first 8 bytes of this one."""
        block = self._slots[self._find_slot(name)]
        return None if block == _EMPTY else block

    def add_block(self, block: int, name: bytes) -> bool:
        """False, and nothing changed, if a name that begins alike is in it. `block` is not."""
        place = self._find_slot(name)
        if self._slots[place] != _EMPTY:
            return False
        self._hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES] = name
        self._slots[place] = block
        self._count += 1
        return True

    def remove_block(self, block: int) -> None:
        """`block` is in it. What stands behind it moves up, so that nothing is searched for past an
        empty place."""
        places, mask = self._slots, self._mask
        hole = self._home_slot(block)
        while places[hole] != block:
            hole = (hole + 1) & mask
        place = (hole + 1) & mask
        while (other := places[place]) != _EMPTY:
            if (place - self._home_slot(other)) & mask >= (place - hole) & mask:
                places[hole], hole = other, place
            place = (place + 1) & mask
        places[hole] = _EMPTY
        self._count -= 1

    def blocks(self) -> list[int]:
        """All that are in it, in no order."""
        return [block for block in self._slots if block != _EMPTY]

    def _find_slot(self, name: bytes) -> int:
        """Of the block whose name begins like this one, or the empty one where it would be."""
        places, names, mask, key = self._slots, self._hashes, self._mask, name[:_KEY_BYTES]
        place = int.from_bytes(key, "big") & mask
        while (block := places[place]) != _EMPTY:
            start = block * HASH_BYTES
            if names[start : start + _KEY_BYTES] == key:
                break
            place = (place + 1) & mask
        return place

    def _home_slot(self, block: int) -> int:
        """The place where the search for it begins."""
        start = block * HASH_BYTES
        return int.from_bytes(self._hashes[start : start + _KEY_BYTES], "big") & self._mask
