"""A prompt's blocks as the prefix directory names them, hashed as far as anybody asks and never twice."""

from collections.abc import Iterator

from baton.block_hash import short_name
from baton.hash_chain import HashChain


class PromptNames:
    def __init__(self, chain: HashChain) -> None:
        self._chain = chain
        self._known: list[int] = []

    @property
    def block_size(self) -> int:
        return self._chain.block_size

    def __iter__(self) -> Iterator[int]:
        """Of the full blocks, the first one first."""
        for block in range(len(self._chain.tokens) // self._chain.block_size):
            if block == len(self._known):
                self._known.append(short_name(self._chain.name(block)))
            yield self._known[block]
