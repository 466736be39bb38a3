"""A prompt as the pool is asked about it: what it descends from, the names of its full blocks, its token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.block_hash import HASH_BYTES, TOKEN_BYTES, BlockHash, chain_names, pack_tokens
from baton.errors import InvalidRequest

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Chain:
    """`names`: 32 bytes for each full block; `tokens`: 4 bytes each, big endian, of the full blocks and of what follows
    them. Raises InvalidRequest if the two cannot belong together; that the names are the tokens' is not checked here,
    and need not be: a match compares both."""

    root: BlockHash
    names: bytes
    tokens: bytes
    block_size: int

    def __post_init__(self) -> None:
        full = len(self.tokens) // (self.block_size * TOKEN_BYTES)
        if len(self.root) != HASH_BYTES or len(self.tokens) % TOKEN_BYTES or len(self.names) != full * HASH_BYTES:
            raise InvalidRequest(
                f"a chain of {len(self.tokens)} bytes of tokens in blocks of {self.block_size} has {full} names of "
                f"{HASH_BYTES} bytes and a root; {len(self.names)} and {len(self.root)} bytes came"
            )

    @classmethod
    def of(cls, root: BlockHash, tokens: Sequence[int], block_size: int) -> "Chain":
        packed = pack_tokens(tokens)
        return cls(root, chain_names(root, packed, block_size), packed, block_size)

    def beginning(self, blocks: int) -> "Chain":
        """Its first full blocks."""
        tokens = self.tokens[: blocks * self.block_size * TOKEN_BYTES]
        return Chain(self.root, self.names[: blocks * HASH_BYTES], tokens, self.block_size)

    def __len__(self) -> int:
        """Full blocks."""
        return len(self.names) // HASH_BYTES

    def name(self, number: int) -> bytes:
        return self.names[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def key(self, number: int) -> int:
        """What an index looks the block up by: the first 8 bytes of its name."""
        start = number * HASH_BYTES
        return int.from_bytes(self.names[start : start + _KEY_BYTES], "big")

    def block_tokens(self, number: int) -> bytes:
        """Of a full block, or what is left of the last one."""
        size = self.block_size * TOKEN_BYTES
        return self.tokens[number * size : (number + 1) * size]


def key_of(name: bytes) -> int:
    return int.from_bytes(name[:_KEY_BYTES], "big")
