"""Short hashes of a prompt's full blocks, computed on demand and at most once."""

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
        """Yield the short hashes of the full blocks, from the first one on."""
        for block in range(len(self._hash_chain.tokens) // self._hash_chain.block_size):
            if block == len(self._hashes):
                self._hashes.append(short_hash(self._hash_chain.block_hash(block)))
            yield self._hashes[block]
