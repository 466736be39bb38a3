"""The block hashes of a growing token list, each computed once and on demand."""

from collections.abc import Sequence

from baton.kv.block_hash import HASH_BYTES, TOKEN_BYTES, BlockHash, block_hash, pack_tokens


class HashChain:
    """Block hashes of the full blocks of `tokens` after `root_hash`.

    The owner may append to `tokens`, and never changes tokens that are hashed.
    """

    def __init__(self, root: BlockHash, tokens: Sequence[int], block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self._hashes = [root]
        self._packed_tokens = bytearray()
        self._packed_hashes = bytearray()

    @property
    def root_hash(self) -> BlockHash:
        return self._hashes[0]

    def parent_hash(self, block: int) -> BlockHash:
        """Return the hash of the block before logical block `block`: the root for block 0."""
        while len(self._hashes) <= block:
            self._hashes.append(
                block_hash(self._hashes[-1], self.block_tokens(len(self._hashes) - 1))
            )
        return self._hashes[block]

    def block_hash(self, block: int) -> BlockHash:
        return self.parent_hash(block + 1)

    def block_tokens(self, block: int) -> tuple[int, ...]:
        return tuple(self.tokens[block * self.block_size : (block + 1) * self.block_size])

    def packed_prefix(self, blocks: int) -> tuple[bytes, bytes]:
        """Return the packed hashes and packed tokens of the first `blocks` full blocks.

        A pool look-up sends them. Packed bytes are kept, so that each block is packed once.
        """
        known, size = len(self._packed_hashes) // HASH_BYTES, self.block_size
        if blocks > known:
            self._packed_hashes += b"".join(
                self.block_hash(block) for block in range(known, blocks)
            )
            self._packed_tokens += pack_tokens(self.tokens[known * size : blocks * size])
        return bytes(self._packed_hashes[: blocks * HASH_BYTES]), bytes(
            self._packed_tokens[: blocks * size * TOKEN_BYTES]
        )
