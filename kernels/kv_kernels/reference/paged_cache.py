"""The paged arena and its operations besides attention, in plain torch.

The arena is `[blocks, layers, 2, kv_heads, block_size, dim]`, contiguous; K is 0 and V is 1. A
*slab* is one layer of one block, a *page* one head of K or V in a slab.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The arena and the views of each layer, made once: making them costs time in a decode step."""

    arena: torch.Tensor  # [blocks, layers, 2, kv_heads, block_size, dim]
    layer_slabs: tuple[torch.Tensor, ...]  # per layer [blocks, 2, kv_heads, block_size, dim]
    # Per layer [rows, block_size * dim]; compute_page_rows has the row numbers.
    layer_pages: tuple[torch.Tensor, ...]

    @staticmethod
    def from_arena(arena: torch.Tensor) -> "PagedCache":
        _, layers, two, heads, block_size, dim = arena.shape
        pages = arena.view(-1, block_size * dim)
        return PagedCache(
            arena, arena.unbind(1), tuple(pages[n * two * heads :] for n in range(layers))
        )

    @property
    def block_size(self) -> int:
        return self.arena.shape[4]

    @property
    def kv_heads(self) -> int:
        return self.arena.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.arena.shape[5] * self.arena.itemsize


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where the KV of a step's tokens is written: token i into place offsets[i] of blocks[i]."""

    blocks: torch.Tensor  # int64 [tokens]
    offsets: torch.Tensor  # int64 [tokens]


def write_kv(
    kv: torch.Tensor,  # [tokens, 2 * kv_heads, dim], the keys of all heads before the values
    cache: PagedCache,
    layer: int,
    slots: SlotMapping,
) -> None:
    """Write keys and values of a step's tokens into one layer of the arena."""
    slab = cache.layer_slabs[layer]
    slab[slots.blocks, :, :, slots.offsets] = kv.unflatten(1, slab.shape[1:3])


def gather_slabs(
    arena: torch.Tensor,  # [blocks, layers, ...], contiguous
    layer: int,
    blocks: torch.Tensor,  # int64 [n]
    out: torch.Tensor,  # [n, ...], contiguous
) -> None:
    """Copy one layer of `blocks` into `out`, in the order of `blocks`."""
    rows, index = _slab_rows(arena, layer, blocks)
    torch.index_select(rows, 0, index, out=out.view(len(blocks), -1))


def scatter_slabs(
    arena: torch.Tensor,  # [blocks, layers, ...], contiguous
    layer: int,
    blocks: torch.Tensor,  # int64 [n], no two equal
    source: torch.Tensor,  # [n, ...], contiguous
) -> None:
    """Copy `source` into one layer of `blocks`: the inverse of gather_slabs."""
    rows, index = _slab_rows(arena, layer, blocks)
    rows.index_copy_(0, index, source.view(len(blocks), -1))


def _slab_rows(
    arena: torch.Tensor, layer: int, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arena with one row per slab, and the rows of `blocks`. A row is copied by one memcpy."""
    num_blocks, num_layers = arena.shape[:2]
    return arena.view(num_blocks * num_layers, -1), blocks * num_layers + layer


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
    """Zero whole blocks.

    A block that a step begins but does not fill is cleared first: attention over padded lengths
    multiplies its unwritten tail by 0, and 0 times a stale NaN would be NaN."""
    arena.index_fill_(0, blocks, 0.0)
