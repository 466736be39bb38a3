"""Reads and writes of the paged arena that are not attention, as plain torch.

The arena is `[blocks, layers, 2, kv_heads, block_size, dim]`, contiguous; K is 0 and V is 1. A *slab* is one layer of
one block.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of a step go: token i into block `blocks[i]` at place `offsets[i]`. Both int64 [tokens]."""

    blocks: torch.Tensor
    offsets: torch.Tensor


def write_kv(
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    arena: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, dim]
    layer: int,
    slots: Slots,
) -> None:
    arena[:, layer, 0][slots.blocks, :, slots.offsets] = key
    arena[:, layer, 1][slots.blocks, :, slots.offsets] = value


def _slab_rows(arena: torch.Tensor, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The arena as one row per slab, and the rows of `blocks` in `layer`: whole rows move as one memcpy each."""
    num_blocks, num_layers = arena.shape[:2]
    return arena.view(num_blocks * num_layers, -1), blocks * num_layers + layer


def gather_slabs(
    arena: torch.Tensor,  # [blocks, layers, ...], contiguous
    layer: int,
    blocks: torch.Tensor,  # int64 [n]
    out: torch.Tensor,  # [n, ...], contiguous
) -> torch.Tensor:
    """Copy one layer of `blocks` into `out`, in the order of `blocks`."""
    rows, index = _slab_rows(arena, layer, blocks)
    torch.index_select(rows, 0, index, out=out.view(len(blocks), -1))
    return out


def scatter_slabs(
    arena: torch.Tensor,  # [blocks, layers, ...], contiguous
    layer: int,
    blocks: torch.Tensor,  # int64 [n], no two equal
    source: torch.Tensor,  # [n, ...], contiguous
) -> None:
    """The inverse of gather_slabs."""
    rows, index = _slab_rows(arena, layer, blocks)
    rows.index_copy_(0, index, source.view(len(blocks), -1))


def copy_blocks(
    arena: torch.Tensor,  # [blocks, ...], contiguous
    source: torch.Tensor,  # int64 [n]
    target: torch.Tensor,  # int64 [n], no two equal
) -> None:
    """Copy whole blocks. All sources are read before any target is written."""
    rows = arena.view(arena.shape[0], -1)
    rows.index_copy_(0, target, rows.index_select(0, source))


def clear_blocks(
    arena: torch.Tensor,  # [blocks, ...]
    blocks: torch.Tensor,  # int64 [n]
) -> None:
    """Zero whole blocks. A block that is begun but not filled is cleared first: attention over padded lengths weighs
    its unwritten tail with 0, and 0 times a stale NaN would be NaN."""
    arena.index_fill_(0, blocks, 0.0)
