"""BlockHash: identifies a full KV block and the whole prefix before it, equal in every process.

SHA-256 is chained over typed, length-prefixed fields, so that two different inputs never have the
same encoding.
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


_PARENT_FIELD_PREFIX = _encode_field(b"parent", bytes(32))[:-32]  # the bytes before any parent


@cache
def _tokens_field_prefix(size: int) -> bytes:
    """Return the bytes before `size` bytes of tokens: a full block or a context's last tokens."""
    return _encode_field(b"tokens", bytes(size))[:-size] if size else _encode_field(b"tokens", b"")


def root_hash(model_digest: bytes, layout: KVLayout, salt: bytes) -> BlockHash:
    """Return the parent of a first block: a hash of model, layout and cache salt."""
    digest = hashlib.sha256(_encode_field(b"baton.kv", b"1"))
    digest.update(_encode_field(b"model", model_digest))
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        digest.update(_encode_field(name.encode(), struct.pack(">Q", getattr(layout, name))))
    digest.update(_encode_field(b"dtype", layout.dtype.encode()))
    digest.update(_encode_field(b"salt", salt))
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the hash of the block that holds `tokens` (ids below 2**32) after `parent`."""
    packed = struct.pack(f">{len(tokens)}I", *tokens)
    return BlockHash(
        hashlib.sha256(
            _PARENT_FIELD_PREFIX + parent + _tokens_field_prefix(len(packed)) + packed
        ).digest()
    )


def short_hash(full_hash: BlockHash) -> int:
    """Return the first 8 bytes of a BlockHash, enough for a hint.

    Among a million blocks two have equal short hashes in one of 37 million such sets.
    """
    return int.from_bytes(full_hash[:8], "big")


def iter_block_hashes(
    root: BlockHash, tokens: Sequence[int], block_size: int
) -> Iterator[BlockHash]:
    """Yield the hashes of the full blocks of `tokens`, first to last."""
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        yield parent


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Encode token ids below 2**32 as they are hashed and sent: 4 bytes each, big endian."""
    packed = array("I", tokens)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def compute_packed_hashes(root: BlockHash, packed: bytes, block_size: int) -> bytes:
    """Return the hashes of the full blocks of packed tokens, 32 bytes each, concatenated."""
    size = block_size * TOKEN_BYTES
    tokens_prefix = _tokens_field_prefix(size)
    initial = hashlib.sha256(_PARENT_FIELD_PREFIX)  # a copy is cheaper than a new digest
    hashes, parent = [], bytes(root)
    for (tokens,) in struct.iter_unpack(f"{size}s", packed[: len(packed) // size * size]):
        digest = initial.copy()
        digest.update(parent + tokens_prefix + tokens)
        parent = digest.digest()
        hashes.append(parent)
    return b"".join(hashes)
