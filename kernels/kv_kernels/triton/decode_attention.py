"""Paged decode attention in Triton: one query per sequence, keys and values read in place.

Split-KV ("flash decoding", Dao et al., 2023): each program processes a few pages with an online
softmax, and a second kernel combines the results. `PaddedDecodeAttention` in
reference/paged_attention.py computes the same in torch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kv_kernels.reference.paged_attention import AttentionContext, AttentionOp, PagedCache

PAGES_PER_SPLIT = 16  # pages that one program processes
_DOT_ROWS = 16  # the fewest rows that tl.dot takes


# grid: [sequences, kv_heads, splits]
@triton.jit
def _decode_split_kernel(
    query,  # [sequences, kv_heads * group, dim], rows of heads contiguous
    slab,  # [blocks, 2, kv_heads, block_size, dim], all but blocks contiguous
    tables,  # int64 [sequences, width]
    # int64 [sequences, 2]: where what the query sees begins, inside the first page, and ends
    spans,
    sums,  # fp32 [sequences, kv_heads * group, splits, dim]: sum of exp(score - peak) * value
    stats,  # fp32 [sequences, kv_heads * group, splits, 2]: peak, sum of exp(score - peak)
    scale,
    query_stride,  # elements between sequences
    block_stride,  # elements between blocks
    width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up for tl.dot
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,  # BLOCK_SIZE, rounded up for tl.dot
    PAGES: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's bf16 arithmetic is wrong
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    row, slot, dim = tl.arange(0, ROWS), tl.arange(0, SLOTS), tl.arange(0, DIMS)
    head = kv_head * GROUP + row
    row_ok, dim_ok = (row < GROUP)[:, None], (dim < DIM)[None, :]
    q = tl.load(
        query + sequence * query_stride + head[:, None] * DIM + dim[None, :],
        mask=row_ok & dim_ok,
        other=0.0,
    )
    start, end = tl.load(spans + sequence * 2), tl.load(spans + sequence * 2 + 1)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, DIMS], tl.float32)
    if UPCAST:
        q = q.to(tl.float32)
    last = tl.minimum((split + 1) * PAGES, tl.cdiv(end, BLOCK_SIZE))
    for page in range(split * PAGES, last):
        block = tl.load(tables + sequence * width + page)
        key_page = slab + block * block_stride + kv_head * BLOCK_SIZE * DIM
        place = page * BLOCK_SIZE + slot
        inside = (slot < BLOCK_SIZE) & (place >= start) & (place < end)
        cell, cell_ok = slot[:, None] * DIM + dim[None, :], inside[:, None] & dim_ok
        key = tl.load(key_page + cell, mask=cell_ok, other=0.0)
        value = tl.load(key_page + KV_HEADS * BLOCK_SIZE * DIM + cell, mask=cell_ok, other=0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        shrink = tl.exp(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        accumulated = accumulated * shrink[:, None] + product
        peak = new_peak
    cell = (sequence * KV_HEADS * GROUP + head) * splits + split
    tl.store(sums + cell[:, None] * DIM + dim[None, :], accumulated, mask=row_ok & dim_ok)
    tl.store(stats + cell * 2, peak, mask=row < GROUP)
    tl.store(stats + cell * 2 + 1, total, mask=row < GROUP)


# grid: [sequences, kv_heads * group]
@triton.jit
def _combine_splits_kernel(
    sums,  # fp32 [sequences, heads, splits, dim]
    stats,  # fp32 [sequences, heads, splits, 2]
    out,  # [sequences, heads, dim], contiguous
    splits,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM, rounded up to a power of two
    SPLITS: tl.constexpr,  # splits, rounded up to a power of two
):
    cell = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    split_ok, dim_ok = split < splits, dim < DIM
    peaks = tl.load(stats + (cell * splits + split) * 2, mask=split_ok, other=float("-inf"))
    totals = tl.load(stats + (cell * splits + split) * 2 + 1, mask=split_ok, other=0.0)
    share = tl.exp(peaks - tl.max(peaks, 0))  # 0 for a split behind the sequence's end
    rows = (cell * splits + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(sums + rows, mask=split_ok[:, None] & dim_ok[None, :], other=0.0)
    joined = tl.sum(parts * share[:, None], 0) / tl.sum(totals * share, 0)
    tl.store(out + cell * DIM + dim, joined.to(out.dtype.element_ty), mask=dim_ok)


@dataclass(frozen=True, slots=True)
class TritonDecodeAttention:
    """One query per sequence, for all decoding sequences of a step."""

    cache: PagedCache
    block_tables: torch.Tensor  # int64 [sequences, width], unused places 0
    visible_spans: torch.Tensor  # int64 [sequences, 2]: first and end token that a query sees
    upcast: bool  # multiply in fp32, for Triton's interpreter

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        sequences, width = self.block_tables.shape
        _, heads, dim = query.shape
        slab, kv_heads, block_size = (
            self.cache.layer_slabs[layer],
            self.cache.kv_heads,
            self.cache.block_size,
        )
        splits = triton.cdiv(width, PAGES_PER_SPLIT)
        group, dims = heads // kv_heads, triton.next_power_of_2(dim)
        sums = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(sequences, heads, splits, 2, dtype=torch.float32, device=query.device)
        _decode_split_kernel[(sequences, kv_heads, splits)](
            query,
            slab,
            self.block_tables,
            self.visible_spans,
            sums,
            stats,
            dim**-0.5,
            query.stride(0),
            slab.stride(0),
            width,
            KV_HEADS=kv_heads,
            GROUP=group,
            ROWS=max(_DOT_ROWS, triton.next_power_of_2(group)),
            DIM=dim,
            DIMS=max(_DOT_ROWS, dims),
            BLOCK_SIZE=block_size,
            SLOTS=max(_DOT_ROWS, triton.next_power_of_2(block_size)),
            PAGES=PAGES_PER_SPLIT,
            UPCAST=self.upcast,
        )
        _combine_splits_kernel[(sequences, heads)](
            sums, stats, out, splits, DIM=dim, DIMS=dims, SPLITS=triton.next_power_of_2(splits)
        )


def plan_decode(
    cache: PagedCache,
    contexts: Sequence[AttentionContext],  # query i attends to contexts[i]
    dtype: torch.dtype,  # of the queries
    *,
    upcast: bool = False,
) -> list[AttentionOp]:
    """Plan the attention of one query per sequence, for every layer of a step.

    It fills the first rows of `out`."""
    if not contexts:
        return []
    tables = np.zeros(
        (len(contexts), max(len(context.block_table) for context in contexts)), dtype=np.int64
    )
    for row, context in enumerate(contexts):
        tables[row, : len(context.block_table)] = context.block_table
    spans = torch.tensor(
        [(context.hidden_tokens, context.length) for context in contexts], device=cache.arena.device
    )
    return [
        TritonDecodeAttention(cache, torch.from_numpy(tables).to(cache.arena.device), spans, upcast)
    ]
