"""Paged decode attention with a grid that does not depend on lengths, for CUDA graphs.

Split-KV ("flash decoding", Dao et al., 2023): the tokens of a sequence are divided evenly among
`splits` programs, and a second kernel combines their results. Lengths and block tables are read on
the device, so that a captured graph serves every step of its batch size. A row of length 0 is
padding: its output is 0.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kv_kernels.reference.paged_attention import PagedCache

_DOT_ROWS = 16  # the fewest rows that tl.dot takes


# grid: [sequences, kv_heads, splits]
@triton.jit
def _split_kernel(
    query,  # [sequences, kv_heads * GROUP, DIM], heads contiguous
    slab,  # [blocks, 2, kv_heads, BLOCK_SIZE, DIM], all but blocks contiguous
    tables,  # int32 [entries], the block tables one after another
    starts,  # int32 [sequences], the entry that each table begins with
    lengths,  # int32 [sequences], tokens in the cache
    sums,  # fp32 [sequences, kv_heads * GROUP, splits, DIM]: sum of exp2(score - peak) * value
    stats,  # fp32 [sequences, kv_heads * GROUP, splits, 2]: peak, sum of exp2(score - peak)
    scale,  # of the scores, times log2(e)
    window,  # tokens that a query sees
    query_stride,  # elements between sequences
    block_stride,  # elements between blocks of slab
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up for tl.dot
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # tokens that are read at a time
    UPCAST: tl.constexpr,  # multiply in fp32: the interpreter's bf16 arithmetic is wrong
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    length = tl.load(lengths + sequence)
    start = tl.maximum(length - window, 0)
    first = start // TILE * TILE
    tiles = tl.cdiv(length - first, TILE)
    per_split = tl.cdiv(tiles, splits)
    begin = first + split * per_split * TILE
    end = tl.minimum(begin + per_split * TILE, length)
    head = kv_head * GROUP + row
    row_ok, dim_ok = (row < GROUP)[:, None], (dim < DIM)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, DIMS], tl.float32)
    cell = (sequence.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
    if begin >= end:
        tl.store(stats + cell * 2, peak, mask=row < GROUP)
        tl.store(stats + cell * 2 + 1, total, mask=row < GROUP)
        return
    q = tl.load(
        query + sequence.to(tl.int64) * query_stride + head[:, None] * DIM + dim[None, :],
        mask=row_ok & dim_ok,
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    table = tables + tl.load(starts + sequence)
    slot = tl.arange(0, TILE)
    for tile in range(begin, end, TILE):
        token = tile + slot
        inside = (token >= start) & (token < end)
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = block * block_stride + (kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * DIM
        cells = slab + place[:, None] + dim[None, :]
        cells_ok = inside[:, None] & dim_ok
        key = tl.load(cells, mask=cells_ok, other=0.0)
        value = tl.load(cells + KV_HEADS * BLOCK_SIZE * DIM, mask=cells_ok, other=0.0)
        if UPCAST:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        accumulated = accumulated * shrink[:, None] + product
        peak = new_peak
    tl.store(sums + cell[:, None] * DIM + dim[None, :], accumulated, mask=row_ok & dim_ok)
    tl.store(stats + cell * 2, peak, mask=row < GROUP)
    tl.store(stats + cell * 2 + 1, total, mask=row < GROUP)


# grid: [sequences, heads]
@triton.jit
def _combine_kernel(
    sums,  # fp32 [sequences, heads, splits, DIM]
    stats,  # fp32 [sequences, heads, splits, 2]
    out,  # [sequences, heads, DIM], contiguous
    splits,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, rounded up to a power of two
):
    cell = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    split_ok, dim_ok = split < splits, dim < DIM
    peaks = tl.load(stats + (cell * splits + split) * 2, mask=split_ok, other=float("-inf"))
    totals = tl.load(stats + (cell * splits + split) * 2 + 1, mask=split_ok, other=0.0)
    used = totals != 0.0  # NaN counts: a damaged cache must not go unnoticed
    share = tl.where(used, tl.exp2(peaks - tl.max(peaks, 0)), 0.0)
    rows = (cell * splits + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(sums + rows, mask=used[:, None] & dim_ok[None, :], other=0.0)
    total = tl.sum(totals * share, 0)
    joined = tl.sum(parts * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + cell * DIM + dim, joined.to(out.dtype.element_ty), mask=dim_ok)


@dataclass(frozen=True, slots=True)
class SplitDecode:
    """Attention of one query per sequence. The same object serves every layer and step."""

    tables: torch.Tensor  # int32 [entries], the block tables one after another
    starts: torch.Tensor  # int32 [sequences], the entry that each table begins with
    lengths: torch.Tensor  # int32 [sequences], tokens in the cache, the query's own included
    sums: torch.Tensor  # fp32 scratch [sequences, heads, splits, dim]
    stats: torch.Tensor  # fp32 scratch [sequences, heads, splits, 2]
    upcast: bool = False  # multiply in fp32, for Triton's interpreter

    @staticmethod
    def allocate(
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        dim: int,
        splits: int,
        *,
        upcast: bool = False,
    ) -> "SplitDecode":
        rows = len(lengths)
        device = tables.device
        return SplitDecode(
            tables,
            starts,
            lengths,
            torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=device),
            torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=device),
            upcast,
        )

    def attend(
        self,
        query: torch.Tensor,  # [sequences, heads, dim]
        cache: PagedCache,
        layer: int,
        window: int | None,
        out: torch.Tensor,  # [sequences, heads, dim], contiguous
    ) -> None:
        sequences, heads, dim = query.shape
        slab, kv_heads = cache.layer_slabs[layer], cache.kv_heads
        splits = self.sums.shape[2]
        group, dims = heads // kv_heads, max(_DOT_ROWS, triton.next_power_of_2(dim))
        _split_kernel[(sequences, kv_heads, splits)](
            query,
            slab,
            self.tables,
            self.starts,
            self.lengths,
            self.sums,
            self.stats,
            dim**-0.5 * 1.4426950408889634,
            window or 1 << 30,
            query.stride(0),
            slab.stride(0),
            KV_HEADS=kv_heads,
            GROUP=group,
            ROWS=max(_DOT_ROWS, triton.next_power_of_2(group)),
            DIM=dim,
            DIMS=dims,
            BLOCK_SIZE=cache.block_size,
            TILE=64,
            UPCAST=self.upcast,
            num_warps=4 if query.dtype is torch.float32 else 2,
            num_stages=3,
        )
        _combine_kernel[(sequences, heads)](
            self.sums,
            self.stats,
            out,
            splits,
            DIM=dim,
            DIMS=dims,
            SPLITS=triton.next_power_of_2(splits),
            num_warps=1 if splits * dim <= 2048 else 4,
        )
