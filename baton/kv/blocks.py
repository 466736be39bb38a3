"""Blocks of KV cache: their layout in memory, and the hashes that identify their contents.

Two nodes may exchange KV only if their layouts are equal. A BlockHash identifies a full block and
the whole prefix before it, equal in every process: SHA-256 is chained over typed, length-prefixed
fields, so that two different inputs never have the same encoding.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import NewType

from baton.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
INT8_KV = "int8"  # the dtype of KV whose rows have a scale of their own
KV_SCALE_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and memory order `[block][layer][k|v][kv_head][token][dim]` of the KV cache.

    A block is contiguous, and so is one layer's part of it (a *slab*), and so is a range of heads
    inside K or V. With dtype int8, the `head_dim` values of one token and head are followed by
    their fp32 scale: a row of `row_bytes` in all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of K or V of one token and head."""
        scale_bytes = KV_SCALE_BYTES if self.dtype == INT8_KV else 0
        return self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of one layer's K and V in one block."""
        return 2 * self.num_kv_heads * self.block_size * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.slab_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def count_blocks(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def slab_offset(self, block_offset: int, layer: int) -> int:
        """Byte offset of a layer's slab, given the byte offset of its block in the segment."""
        return block_offset + layer * self.slab_bytes

    def require_equal(self, other: "KVLayout", whose: str) -> None:
        """Raise LayoutMismatch that names the first field that differs and both values."""
        for field in fields(self):
            own, requested = getattr(self, field.name), getattr(other, field.name)
            if own != requested:
                raise LayoutMismatch(
                    f"KV layout of {whose}: {field.name} is {requested!r}, the cluster has {own!r}"
                )


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


_HASHED_AHEAD_BLOCKS = 32  # with one that is asked for, because those behind it often follow


class HashChain:
    """Block hashes of the full blocks of `tokens` after `root_hash`.

    The owner may append to `tokens`, and never changes tokens that are hashed.
    """

    def __init__(self, root: BlockHash, tokens: Sequence[int], block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self._hashes = [root]
        self._packed_tokens = bytearray()
        self._packed_hashes = bytearray()

    @property
    def root_hash(self) -> BlockHash:
        return self._hashes[0]

    def parent_hash(self, block: int) -> BlockHash:
        """Return the hash of the block before logical block `block`: the root for block 0.

        Raises IndexError if that block is not full.
        """
        if len(self._hashes) <= block:
            self.compute_hashes(max(block, len(self._hashes) - 1 + _HASHED_AHEAD_BLOCKS))
        return self._hashes[block]

    def compute_hashes(self, blocks: int) -> None:
        """Compute the hashes of the first `blocks` blocks, or of the full ones among them, at once.

        That takes half of the time of one after the other.
        """
        known, size = len(self._hashes) - 1, self.block_size
        if blocks <= known:
            return
        packed = pack_tokens(self.tokens[known * size : blocks * size])
        hashes = compute_packed_hashes(self._hashes[-1], packed, size)
        self._hashes += (
            BlockHash(hashes[start : start + HASH_BYTES])
            for start in range(0, len(hashes), HASH_BYTES)
        )

    def block_hash(self, block: int) -> BlockHash:
        return self.parent_hash(block + 1)

    def block_tokens(self, block: int) -> tuple[int, ...]:
        return tuple(self.tokens[block * self.block_size : (block + 1) * self.block_size])

    def packed_prefix(self, blocks: int) -> tuple[bytes, bytes]:
        """Return the packed hashes and packed tokens of the first `blocks` full blocks.

        A pool look-up sends them. Packed bytes are kept, so that each block is packed once.
        """
        known, size = len(self._packed_hashes) // HASH_BYTES, self.block_size
        if blocks > known:
            self.compute_hashes(blocks)
            self._packed_hashes += b"".join(self._hashes[known + 1 : blocks + 1])
            self._packed_tokens += pack_tokens(self.tokens[known * size : blocks * size])
        return bytes(self._packed_hashes[: blocks * HASH_BYTES]), bytes(
            self._packed_tokens[: blocks * size * TOKEN_BYTES]
        )
