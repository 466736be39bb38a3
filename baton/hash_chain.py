"""The BlockHashes of a growing token list, each computed once and only when asked for."""

from collections.abc import Sequence

from baton.block_hash import BlockHash, block_hash


class HashChain:
    """Names of the full blocks of `tokens` after `root`. `tokens` may be appended to; named tokens never change."""

    def __init__(self, root: BlockHash, tokens: Sequence[int], block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self._names = [root]

    def parent(self, block: int) -> BlockHash:
        """Name of what precedes logical block `block`: the root for block 0."""
        while len(self._names) <= block:
            self._names.append(block_hash(self._names[-1], self.block_tokens(len(self._names) - 1)))
        return self._names[block]

    def name(self, block: int) -> BlockHash:
        return self.parent(block + 1)

    def block_tokens(self, block: int) -> tuple[int, ...]:
        return tuple(self.tokens[block * self.block_size : (block + 1) * self.block_size])
