"""Causal attention of prefill chunks over a paged cache, in Triton.

FlashAttention-2 (Dao, 2023): a program computes a tile of queries of one head with an online
softmax over the keys in tiles, whose pages are read in place. Chunks of several sequences run in
one launch: the host lists their tiles. `TiledPrefillAttention` in reference/attention.py computes
the same in torch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kv_kernels.reference.paged_attention import PagedCache

QUERY_TILE = 128  # queries of one program
_KEY_TILE = 64  # keys that a program reads at a time
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_keys(
    q,  # [QUERIES, DIMS], scaled
    peak,
    total,
    accumulated,
    begin,
    end,
    key_slab,
    table,
    position,  # [QUERIES], of the queries
    window,
    block_stride,
    VALUES: tl.constexpr,  # elements between the keys and the values of a head
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Continue the online softmax over the keys from `begin` to `end`."""
    slot, dim = tl.arange(0, KEYS), tl.arange(0, DIMS)
    for first in range(begin, end, KEYS):
        token = first + slot
        if MASKED:
            block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)
        else:
            block = tl.load(table + token // BLOCK_SIZE)
        place = block.to(tl.int64) * block_stride + token % BLOCK_SIZE * DIM
        cells = key_slab + place[:, None] + dim[None, :]
        if MASKED:
            cells_ok = (token < end)[:, None] & (dim < DIM)[None, :]
            key = tl.load(cells, mask=cells_ok, other=0.0)
            value = tl.load(cells + VALUES, mask=cells_ok, other=0.0)
        elif DIM == DIMS:
            key, value = tl.load(cells), tl.load(cells + VALUES)
        else:
            dim_ok = (dim < DIM)[None, :]
            key = tl.load(cells, mask=dim_ok, other=0.0)
            value = tl.load(cells + VALUES, mask=dim_ok, other=0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & (
                token[None, :] > position[:, None] - window
            )
            scores = tl.where(seen, scores, -1.0e30)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        accumulated = accumulated * shrink[:, None]
        accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision="ieee")
        peak = new_peak
    return peak, total, accumulated


# grid: [tiles, heads]
@triton.jit
def _prefill_kernel(
    query,  # [tokens, heads, DIM], heads contiguous
    slab,  # [blocks, 2, KV_HEADS, BLOCK_SIZE, DIM], all but blocks contiguous
    tables,  # int32 [entries], the block tables one after another
    tiles,  # int32 [tiles, 4]: first entry of the table, first query row, its position, queries
    out,  # [tokens, heads, DIM], contiguous
    scale,  # of the scores, times log2(e)
    window,  # tokens that a query sees
    query_stride,  # elements between tokens
    block_stride,  # elements between blocks of slab
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's bf16 arithmetic is wrong
):
    tile, head = tl.program_id(0), tl.program_id(1)
    start, first_row = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    first_position, count = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    row, dim = tl.arange(0, QUERIES), tl.arange(0, DIMS)
    cells_ok = (row < count)[:, None] & (dim < DIM)[None, :]
    cells = (first_row + row).to(tl.int64)[:, None] * query_stride + head * DIM + dim[None, :]
    q = tl.load(query + cells, mask=cells_ok, other=0.0)
    if UPCAST:
        q = q.to(tl.float32) * scale
    else:
        q = (q.to(tl.float32) * scale).to(q.dtype)
    position = first_position + row
    key_slab = slab + head // (HEADS // KV_HEADS) * BLOCK_SIZE * DIM
    table = tables + start
    end = first_position + count
    # Keys that all queries of the tile see: after the window's start of the last one, up to the
    # position of the first one.
    begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    open_begin = tl.cdiv(tl.maximum(first_position + QUERIES - window, 0), KEYS) * KEYS
    open_end = (first_position + 1) // KEYS * KEYS
    open_begin = tl.minimum(open_begin, tl.maximum(open_end, begin))
    open_end = tl.maximum(open_end, open_begin)
    peak = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    accumulated = tl.zeros([QUERIES, DIMS], tl.float32)
    if begin < open_begin:
        peak, total, accumulated = _attend_keys(
            q, peak, total, accumulated, begin, open_begin, key_slab, table, position, window,
            block_stride, KV_HEADS * BLOCK_SIZE * DIM, DIM, DIMS, BLOCK_SIZE, KEYS, True, UPCAST,
        )  # fmt: skip
    peak, total, accumulated = _attend_keys(
        q, peak, total, accumulated, open_begin, open_end, key_slab, table, position, window,
        block_stride, KV_HEADS * BLOCK_SIZE * DIM, DIM, DIMS, BLOCK_SIZE, KEYS, False, UPCAST,
    )  # fmt: skip
    peak, total, accumulated = _attend_keys(
        q, peak, total, accumulated, open_end, end, key_slab, table, position, window,
        block_stride, KV_HEADS * BLOCK_SIZE * DIM, DIM, DIMS, BLOCK_SIZE, KEYS, True, UPCAST,
    )  # fmt: skip
    attended = accumulated / total[:, None]
    places = (first_row + row).to(tl.int64)[:, None] * HEADS * DIM + head * DIM + dim[None, :]
    tl.store(out + places, attended.to(out.dtype.element_ty), mask=cells_ok)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A chunk of one sequence: its newest tokens, whose KV is in the cache already."""

    first_row: int  # of the step's queries
    num_queries: int
    first_position: int  # in its sequence
    table_start: int  # entry of the block tables that its own begins with


def list_query_tiles(chunks: Sequence[PrefillChunk]) -> np.ndarray:
    """Tiles of queries, int32 [tiles, 4], as the kernel takes them: those with most keys first."""
    tiles = [
        (
            chunk.table_start,
            chunk.first_row + begin,
            chunk.first_position + begin,
            min(QUERY_TILE, chunk.num_queries - begin),
        )
        for chunk in chunks
        for begin in range(0, chunk.num_queries, QUERY_TILE)
    ]
    return np.array(sorted(tiles, key=lambda tile: -tile[2]), dtype=np.int32)


def attend_chunks(
    query: torch.Tensor,  # [tokens, heads, dim]
    cache: PagedCache,
    layer: int,
    tables: torch.Tensor,  # int32 [entries], the block tables one after another
    tiles: torch.Tensor,  # int32 [tiles, 4], from list_query_tiles
    window: int | None,
    out: torch.Tensor,  # [tokens, heads, dim], contiguous
    *,
    upcast: bool = False,
) -> None:
    """Fill the rows of `out` of the queries in `tiles`."""
    _, heads, dim = query.shape
    slab = cache.layer_slabs[layer]
    wide = query.dtype is torch.float32
    _prefill_kernel[(len(tiles), heads)](
        query,
        slab,
        tables,
        tiles,
        out,
        dim**-0.5 * _LOG2_E,
        window or 1 << 30,
        query.stride(0),
        slab.stride(0),
        HEADS=heads,
        KV_HEADS=cache.kv_heads,
        DIM=dim,
        DIMS=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=cache.block_size,
        QUERIES=QUERY_TILE,
        KEYS=32 if wide else _KEY_TILE,
        UPCAST=upcast,
        num_warps=8 if wide else 4,
        num_stages=2,
    )
