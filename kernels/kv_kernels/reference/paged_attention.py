"""The paged KV cache and attention over it in plain torch: the reference, and what a CPU runs.

The arena is `[blocks, layers, 2, kv_heads, block_size, row]`, contiguous; K is 0 and V is 1. A
*slab* is one layer of one block, a *page* one head of K or V in a slab. A row has `dim` numbers;
in int8 its scale stands behind them (`int8_kv.py`), and attention decodes the pages it gathers.

Attention gathers pages once per layer by one `index_select` of whole pages, so that keys and values
of a sequence come out as `[kv_heads, tokens, dim]` without a transposition (advanced indexing is
five times slower). The row numbers are computed once per step and used for every layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kv_kernels.reference import int8_kv

# Queries of a chunk per call: most of the masked triangle is skipped, and scores stay in L2.
QUERY_TILE = 64
# A group of decoding sequences ends where the next is shorter than this share of its longest, or
# where the pages gathered for one layer would leave the cache before attention reads them.
MIN_LENGTH_RATIO = 0.85
MAX_GATHER_BYTES = 4 << 20
BlockTable = npt.NDArray[np.int64]  # [blocks], exactly those that hold a sequence's context
# attend(query [rows, heads, dim], layer, out [rows, heads, dim]) fills the rows of `out` of those
# queries that it was planned for.
AttentionOp = Callable[[torch.Tensor, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The arena and the views of each layer, made once: making them costs time in a decode step."""

    arena: torch.Tensor  # [blocks, layers, 2, kv_heads, block_size, row]
    layer_slabs: tuple[torch.Tensor, ...]  # per layer [blocks, 2, kv_heads, block_size, row]
    # Per layer [rows, block_size * row]; compute_page_rows has the row numbers.
    layer_pages: tuple[torch.Tensor, ...]
    dtype: torch.dtype  # of keys and values where attention computes with them

    @staticmethod
    def from_arena(arena: torch.Tensor, dtype: torch.dtype | None = None) -> "PagedCache":
        """`dtype` is that of attention; None: that of the arena, which is then not int8."""
        _, layers, two, heads, block_size, row = arena.shape
        pages = arena.view(-1, block_size * row)
        return PagedCache(
            arena,
            arena.unbind(1),
            tuple(pages[n * two * heads :] for n in range(layers)),
            dtype or arena.dtype,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether rows are in int8, with a scale each."""
        return self.arena.dtype is torch.int8

    @property
    def block_size(self) -> int:
        return self.arena.shape[4]

    @property
    def kv_heads(self) -> int:
        return self.arena.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, as attention reads them."""
        scale_bytes = int8_kv.SCALE_BYTES if self.is_quantized else 0
        return 2 * self.kv_heads * (self.arena.shape[5] - scale_bytes) * self.dtype.itemsize


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
    rows = int8_kv.encode_rows(kv) if cache.is_quantized else kv
    slab[slots.blocks, :, :, slots.offsets] = rows.unflatten(1, slab.shape[1:3])


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
    arena.index_fill_(0, blocks, 0)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What one sequence attends to: its blocks, and how many tokens of them count."""

    block_table: BlockTable
    length: int  # tokens in the blocks that count
    # The first of these tokens, which the window of the oldest query hides: fewer than a block.
    hidden_tokens: int = 0


def clip_to_window(
    context: AttentionContext, window: int | None, queries: int, block_size: int
) -> AttentionContext:
    """Leave out the blocks of a whole context that the newest `queries` tokens do not see.

    Each of these tokens sees itself and the `window` - 1 tokens before it; None: all of them."""
    behind = 0 if window is None else max(0, context.length - queries + 1 - window)
    if behind == 0:
        return context
    skipped = behind // block_size
    return AttentionContext(
        context.block_table[skipped:], context.length - skipped * block_size, behind % block_size
    )


def compute_page_rows(cache: PagedCache, tables: npt.NDArray[np.int64]) -> torch.Tensor:
    """Row numbers of the pages of block tables [sequences, n], for `gather_pages`.

    Returns int64 [2 * sequences * kv_heads * n]: [k|v, sequence, head, n], flattened."""
    _, layers, two, heads, _, _ = cache.arena.shape
    parts = np.arange(two, dtype=np.int64).reshape(two, 1, 1, 1) * heads
    head = np.arange(heads, dtype=np.int64).reshape(1, 1, heads, 1)
    rows = tables[None, :, None, :] * (layers * two * heads) + parts + head
    return torch.from_numpy(rows.reshape(-1)).to(cache.arena.device)


def gather_pages(
    cache: PagedCache, layer: int, rows: torch.Tensor, sequences: int
) -> tuple[torch.Tensor, ...]:
    """Keys and values, each [sequences, kv_heads, tokens, dim]."""
    pages = cache.layer_pages[layer].index_select(0, rows)
    rows_of_heads = pages.view(2, sequences, cache.kv_heads, -1, cache.arena.shape[5])
    if cache.is_quantized:
        rows_of_heads = int8_kv.decode_rows(rows_of_heads, cache.dtype)
    return rows_of_heads.unbind()


@dataclass(frozen=True, slots=True)
class PaddedDecodeAttention:
    """One query per sequence, for sequences of similar length, padded to the longest."""

    cache: PagedCache
    first_query: int  # of the step's queries, as is the next
    end_query: int
    page_rows: torch.Tensor  # int64 [2 * sequences * kv_heads * blocks]
    mask: torch.Tensor | None  # [sequences, 1, 1, tokens], 0 or -inf; None when nothing is hidden

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """The heads that share a KV head are folded into the query length.

        `enable_gqa` is an order of magnitude slower with query length 1 in bf16."""
        key, value = gather_pages(
            self.cache, layer, self.page_rows, self.end_query - self.first_query
        )
        folded = (self.cache.kv_heads, -1)
        grouped = query[self.first_query : self.end_query].unflatten(1, folded)
        attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=self.mask)
        out[self.first_query : self.end_query].unflatten(1, folded).copy_(attended)


def _decode_group(
    cache: PagedCache, first: int, contexts: Sequence[AttentionContext], dtype: torch.dtype
) -> PaddedDecodeAttention:
    blocks = max(len(context.block_table) for context in contexts)
    tokens = blocks * cache.block_size
    # Padding repeats the sequence's own blocks, so that it reads no block of another sequence.
    tables = np.stack([np.resize(context.block_table, blocks) for context in contexts])
    mask = None
    windowed = any(context.hidden_tokens for context in contexts)
    if windowed or min(context.length for context in contexts) < tokens:
        place = torch.arange(tokens)
        hidden = place >= torch.tensor([context.length for context in contexts])[:, None]
        if windowed:
            hidden |= place < torch.tensor([context.hidden_tokens for context in contexts])[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
        mask = mask[:, None, None].to(cache.arena.device)
    return PaddedDecodeAttention(
        cache, first, first + len(contexts), compute_page_rows(cache, tables), mask
    )


def plan_decode(
    cache: PagedCache,
    # Query i attends to contexts[i]. Longest first, but for differences within a block.
    contexts: Sequence[AttentionContext],
    dtype: torch.dtype,  # of the queries
) -> list[AttentionOp]:
    """Plan the attention of one query per sequence, for every layer of a step."""
    groups: list[AttentionOp] = []
    first = 0
    for row in range(1, len(contexts) + 1):
        longest = contexts[first].length
        fits = (row + 1 - first) * longest * cache.token_bytes <= MAX_GATHER_BYTES
        if row == len(contexts) or not fits or contexts[row].length < MIN_LENGTH_RATIO * longest:
            groups.append(_decode_group(cache, first, contexts[first:row], dtype))
            first = row
    return groups


def causal_mask(reach: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An additive mask [QUERY_TILE, reach + QUERY_TILE] for a tile of queries.

    Its last columns are the causal triangle of the tile against itself, the columns before are
    open. A tile from position p of its sequence on uses the columns from reach - p on."""
    mask = torch.zeros(QUERY_TILE, reach + QUERY_TILE, dtype=dtype)
    mask[:, reach:] = torch.full((QUERY_TILE, QUERY_TILE), -math.inf).triu_(1)
    return mask.to(device)


def window_mask(window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A causal_mask with reach `window` - 1 for a sliding window.

    Each query sees itself and the `window` - 1 tokens before it: row i is open from column i to
    column i + window - 1."""
    mask = causal_mask(window - 1, dtype, torch.device("cpu"))
    return mask.add_(torch.full_like(mask, -math.inf).tril_(-1)).to(device)


@dataclass(frozen=True, slots=True)
class TiledPrefillAttention:
    """Causal attention of one chunk over its paged prefix and itself.

    The chunk's own KV is in the arena already. A tile sees only as far back as the mask reaches."""

    cache: PagedCache
    first_query: int  # of the step's queries, as is the next
    end_query: int
    start_position: int  # position of query `first_query` in the blocks that are read
    page_rows: torch.Tensor  # int64 [2 * kv_heads * blocks]
    mask: torch.Tensor  # causal_mask with reach >= the context's length, or window_mask

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        key, value = gather_pages(self.cache, layer, self.page_rows, 1)
        reach = self.mask.shape[1] - QUERY_TILE
        for first in range(self.first_query, self.end_query, QUERY_TILE):
            last = min(self.end_query, first + QUERY_TILE)
            position = self.start_position + first - self.first_query
            begin, end = max(0, position - reach), position + last - first
            attended = F.scaled_dot_product_attention(
                query[first:last].transpose(0, 1)[None],
                key[:, :, begin:end],
                value[:, :, begin:end],
                attn_mask=self.mask[
                    : last - first, reach - position + begin : reach - position + end
                ],
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out[first:last].copy_(attended[0].transpose(0, 1))


def plan_prefill(
    cache: PagedCache,
    first: int,
    count: int,
    context: AttentionContext,  # ends with the chunk's last token
    mask: torch.Tensor,  # causal_mask with reach >= context.length, or window_mask
) -> AttentionOp:
    """Plan the attention of `count` queries from `first` on, for every layer of a step.

    They are the newest tokens of one sequence."""
    rows = compute_page_rows(cache, context.block_table[None])
    return TiledPrefillAttention(cache, first, first + count, context.length - count, rows, mask)
