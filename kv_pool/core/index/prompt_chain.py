"""A prompt as the pool is asked about it: what it descends from, the names of its full blocks, its
token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.kv.block_hash import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHash,
    compute_packed_hashes,
    pack_tokens,
)

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class PromptChain:
    """`packed_hashes`: 32 bytes for each full block; `packed_tokens`: 4 bytes each, big endian, of
    the full blocks and of what follows them. Raises InvalidRequest if the two cannot belong
    together; that the names are the tokens' is not checked here, and need not be: a match compares
    both."""

    root_hash: BlockHash
    packed_hashes: bytes
    packed_tokens: bytes
    block_size: int

    def __post_init__(self) -> None:
        full = len(self.packed_tokens) // (self.block_size * TOKEN_BYTES)
        if (
            len(self.root_hash) != HASH_BYTES
            or len(self.packed_tokens) % TOKEN_BYTES
            or len(self.packed_hashes) != full * HASH_BYTES
        ):
            raise InvalidRequest(
                f"a chain of {len(self.packed_tokens)} bytes of tokens in blocks of {self.block_size} has {full} names of "
                f"{HASH_BYTES} bytes and a root; {len(self.packed_hashes)} and {len(self.root_hash)} bytes came"
            )

    @classmethod
    def from_tokens(cls, root: BlockHash, tokens: Sequence[int], block_size: int) -> "PromptChain":
        packed = pack_tokens(tokens)
        return cls(root, compute_packed_hashes(root, packed, block_size), packed, block_size)

    def prefix(self, blocks: int) -> "PromptChain":
        """Its first full blocks."""
        tokens = self.packed_tokens[: blocks * self.block_size * TOKEN_BYTES]
        return PromptChain(
            self.root_hash, self.packed_hashes[: blocks * HASH_BYTES], tokens, self.block_size
        )

    def __len__(self) -> int:
        """Full blocks."""
        return len(self.packed_hashes) // HASH_BYTES

    def block_hash(self, number: int) -> bytes:
        return self.packed_hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def index_key(self, number: int) -> int:
        """What an index looks the block up by: the first 8 bytes of its name."""
        start = number * HASH_BYTES
        return int.from_bytes(self.packed_hashes[start : start + _KEY_BYTES], "big")

    def block_tokens(self, number: int) -> bytes:
        """Of a full block, or what is left of the last one."""
        size = self.block_size * TOKEN_BYTES
        return self.packed_tokens[number * size : (number + 1) * size]


def index_key_of(name: bytes) -> int:
    return int.from_bytes(name[:_KEY_BYTES], "big")
