"""Geometry of the KV cache. Two nodes may exchange KV only if their layouts are equal."""

from dataclasses import dataclass, fields

from baton.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and memory order `[block][layer][k|v][kv_head][token][dim]` of the KV cache.

    A block is contiguous, and so is one layer's part of it (a *slab*), and so is a range of heads
    inside K or V.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a key of DTYPE_BYTES

    @property
    def slab_bytes(self) -> int:
        """Bytes of one layer's K and V in one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

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
