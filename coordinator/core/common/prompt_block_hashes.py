"""A prompt's blocks as the prefix directory names them, hashed as far as anybody asks and never
twice."""

from collections.abc import Iterator

from baton.kv.block_hash import short_hash
from baton.kv.hash_chain import HashChain


class PromptBlockHashes:
    def __init__(self, chain: HashChain) -> None:
        self._hash_chain = chain
        self._hashes: list[int] = []

    @property
    def block_size(self) -> int:
        return self._hash_chain.block_size

    def __iter__(self) -> Iterator[int]:
        """Of the full blocks, the first one first."""
        for block in range(len(self._hash_chain.tokens) // self._hash_chain.block_size):
            if block == len(self._hashes):
                self._hashes.append(short_hash(self._hash_chain.block_hash(block)))
            yield self._hashes[block]
