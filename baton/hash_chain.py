"""The BlockHashes of a growing token list, each computed once and only when asked for."""

from collections.abc import Sequence

from baton.block_hash import HASH_BYTES, TOKEN_BYTES, BlockHash, block_hash, pack_tokens


class HashChain:
    """Names of the full blocks of `tokens` after `root`. `tokens` may be appended to; named tokens never change."""

    def __init__(self, root: BlockHash, tokens: Sequence[int], block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self._names = [root]
        self._packed = bytearray()
        self._joined = bytearray()

    @property
    def root(self) -> BlockHash:
        return self._names[0]

    def parent(self, block: int) -> BlockHash:
        """Name of what precedes logical block `block`: the root for block 0."""
        while len(self._names) <= block:
            self._names.append(block_hash(self._names[-1], self.block_tokens(len(self._names) - 1)))
        return self._names[block]

    def name(self, block: int) -> BlockHash:
        return self.parent(block + 1)

    def block_tokens(self, block: int) -> tuple[int, ...]:
        return tuple(self.tokens[block * self.block_size : (block + 1) * self.block_size])

    def joined(self, blocks: int) -> tuple[bytes, bytes]:
        """Names and packed tokens of the first so many full blocks, as the pool is asked about them. What was joined
        before is not joined again."""
        known, size = len(self._joined) // HASH_BYTES, self.block_size
        if blocks > known:
            self._joined += b"".join(self.name(block) for block in range(known, blocks))
            self._packed += pack_tokens(self.tokens[known * size : blocks * size])
        return bytes(self._joined[: blocks * HASH_BYTES]), bytes(self._packed[: blocks * size * TOKEN_BYTES])
