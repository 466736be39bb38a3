"""A hash table from block hash to block number, with open addressing.

Linear probing, and algorithm R for removal (Knuth, The Art of Computer Programming 3, section 6.4).
The key is the first 8 bytes of a block hash, which are uniformly distributed already. It takes
about 40 bytes per block, block hashes included; a dictionary would take 120 bytes more.
"""

from array import array

from baton.kv.blocks import HASH_BYTES

_KEY_BYTES = 8
_EMPTY = -1


class BlockHashTable:
    """A table for the hashes of blocks 0 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int) -> None:
        num_slots = 1 << (num_blocks * 3 // 2).bit_length()  # at most two thirds are filled
        self._mask = num_slots - 1
        self._slots = array("i", [_EMPTY]) * num_slots
        self._hashes = bytearray(num_blocks * HASH_BYTES)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def block_hash(self, block: int) -> bytes:
        """Return the hash with which the block was last added."""
        return bytes(self._hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def find_block(self, block_hash: bytes) -> int | None:
        """Return the block whose hash has the same first 8 bytes as `block_hash`."""
        block = self._slots[self._find_slot(block_hash)]
        return None if block == _EMPTY else block

    def add_block(self, block: int, block_hash: bytes) -> bool:
        """Add a block that is not in the table.

        Returns False and changes nothing if a hash with the same first 8 bytes is in the table.
        """
        slot = self._find_slot(block_hash)
        if self._slots[slot] != _EMPTY:
            return False
        self._hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES] = block_hash
        self._slots[slot] = block
        self._count += 1
        return True

    def remove_block(self, block: int) -> None:
        """Remove a block that is in the table, and move later entries up to close the gap.

        A search ends at the first empty slot, so no entry may have one before it in its run.
        """
        slots, mask = self._slots, self._mask
        hole = self._home_slot(block)
        while slots[hole] != block:
            hole = (hole + 1) & mask
        slot = (hole + 1) & mask
        while (other := slots[slot]) != _EMPTY:
            if (slot - self._home_slot(other)) & mask >= (slot - hole) & mask:
                slots[hole], hole = other, slot
            slot = (slot + 1) & mask
        slots[hole] = _EMPTY
        self._count -= 1

    def blocks(self) -> list[int]:
        """Return all blocks in the table, in no particular order."""
        return [block for block in self._slots if block != _EMPTY]

    def _find_slot(self, block_hash: bytes) -> int:
        """Return the slot of the block with this key, or the empty slot where it belongs."""
        slots, hashes, mask, key = self._slots, self._hashes, self._mask, block_hash[:_KEY_BYTES]
        slot = int.from_bytes(key, "big") & mask
        while (block := slots[slot]) != _EMPTY:
            start = block * HASH_BYTES
            if hashes[start : start + _KEY_BYTES] == key:
                break
            slot = (slot + 1) & mask
        return slot

    def _home_slot(self, block: int) -> int:
        """Return the slot where the search for a block begins."""
        start = block * HASH_BYTES
        return int.from_bytes(self._hashes[start : start + _KEY_BYTES], "big") & self._mask
