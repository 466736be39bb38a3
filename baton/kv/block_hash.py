"""BlockHash: the name of a full block's contents, equal in every process that computes it.

SHA-256 chained over typed, length-prefixed fields, so that no two different inputs can be spelled
the same way. A hash names the whole prefix up to and including its block.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NewType

from baton.kv.kv_layout import KVLayout

BlockHash = NewType("BlockHash", bytes)  # 32 bytes
HASH_BYTES = 32
TOKEN_BYTES = 4


def _encode_field(tag: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(tag)) + tag + struct.pack(">Q", len(value)) + value


_PARENT_FIELD_PREFIX = _encode_field(b"parent", bytes(32))[:-32]  # what precedes any parent


@cache
def _tokens_field_prefix(size: int) -> bytes:
    """What precedes `size` bytes of tokens: a full block's, or less at the end of a context."""
    return _encode_field(b"tokens", bytes(size))[:-size] if size else _encode_field(b"tokens", b"")


def root_hash(model_digest: bytes, layout: KVLayout, salt: bytes) -> BlockHash:
    """The parent of a first block: what must agree before any tokens can."""
    digest = hashlib.sha256(_encode_field(b"baton.kv", b"1"))
    digest.update(_encode_field(b"model", model_digest))
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        digest.update(_encode_field(name.encode(), struct.pack(">Q", getattr(layout, name))))
    digest.update(_encode_field(b"dtype", layout.dtype.encode()))
    digest.update(_encode_field(b"salt", salt))
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Name of the block that holds `tokens` (token ids below 2**32) after `parent`."""
    packed = struct.pack(f">{len(tokens)}I", *tokens)
    return BlockHash(
        hashlib.sha256(
            _PARENT_FIELD_PREFIX + parent + _tokens_field_prefix(len(packed)) + packed
        ).digest()
    )


def short_hash(name: BlockHash) -> int:
    """Enough of a BlockHash for a hint: among a million blocks two are alike once in 37 million
    such sets."""
    return int.from_bytes(name[:8], "big")


def iter_block_hashes(
    root: BlockHash, tokens: Sequence[int], block_size: int
) -> Iterator[BlockHash]:
    """Hashes of the full blocks of `tokens`, first to last."""
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        yield parent


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids below 2**32 as they are hashed and sent: 4 bytes each, big endian."""
    packed = array("I", tokens)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def compute_packed_hashes(root: BlockHash, packed: bytes, block_size: int) -> bytes:
    """`chain` of packed tokens, all at once: 32 bytes for each full block."""
    size = block_size * TOKEN_BYTES
    between = _tokens_field_prefix(size)
    begun = hashlib.sha256(_PARENT_FIELD_PREFIX)  # copying it is cheaper than beginning anew
    names, parent = [], bytes(root)
    for (tokens,) in struct.iter_unpack(f"{size}s", packed[: len(packed) // size * size]):
        message = begun.copy()
        message.update(parent + between + tokens)
        parent = message.digest()
        names.append(parent)
    return b"".join(names)
