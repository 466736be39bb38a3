"""A prompt in the pool's requests: root hash, hashes of its full blocks, and token ids."""

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
    """The block hashes and tokens of a prompt. Raises InvalidRequest if their lengths do not fit.

    It is not checked that the hashes are those of the tokens: a match in the index compares both.
    """

    root_hash: BlockHash  # of model, layout and salt: what the first block's hash builds on
    packed_hashes: bytes  # 32 bytes for each full block
    packed_tokens: bytes  # 4 bytes each, big endian: all full blocks, and what follows them
    block_size: int  # tokens

    def __post_init__(self) -> None:
        full = len(self.packed_tokens) // (self.block_size * TOKEN_BYTES)
        if (
            len(self.root_hash) != HASH_BYTES
            or len(self.packed_tokens) % TOKEN_BYTES
            or len(self.packed_hashes) != full * HASH_BYTES
        ):
            raise InvalidRequest(
                f"a chain of {len(self.packed_tokens)} bytes of tokens in blocks of "
                f"{self.block_size} needs {full} block hashes and a root hash of {HASH_BYTES} "
                f"bytes each; got {len(self.packed_hashes)} and {len(self.root_hash)} bytes"
            )

    @classmethod
    def from_tokens(cls, root: BlockHash, tokens: Sequence[int], block_size: int) -> "PromptChain":
        packed = pack_tokens(tokens)
        return cls(root, compute_packed_hashes(root, packed, block_size), packed, block_size)

    def prefix(self, blocks: int) -> "PromptChain":
        """Return a chain of the first `blocks` full blocks."""
        tokens = self.packed_tokens[: blocks * self.block_size * TOKEN_BYTES]
        return PromptChain(
            self.root_hash, self.packed_hashes[: blocks * HASH_BYTES], tokens, self.block_size
        )

    def __len__(self) -> int:
        """Return the number of full blocks."""
        return len(self.packed_hashes) // HASH_BYTES

    def block_hash(self, number: int) -> bytes:
        return self.packed_hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def index_key(self, number: int) -> int:
        """Return the key of an index entry: the first 8 bytes of the block hash."""
        start = number * HASH_BYTES
        return int.from_bytes(self.packed_hashes[start : start + _KEY_BYTES], "big")

    def block_tokens(self, number: int) -> bytes:
        """Return the packed tokens of a block, which may be the last, partial one."""
        size = self.block_size * TOKEN_BYTES
        return self.packed_tokens[number * size : (number + 1) * size]


def index_key_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_KEY_BYTES], "big")
