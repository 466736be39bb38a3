"""Attention over a paged cache as plain torch: the oracle, and the path of the CPU.

Pages are gathered once per layer by one `index_select` of whole pages, so that keys and values of a
sequence come out as `[kv_heads, tokens, dim]` without a transposition (advanced indexing is five
times slower). The row numbers are found once per step and serve every layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kv_kernels.reference.paged_cache import PagedCache

QUERY_TILE = (
    64  # queries per call of a chunk: skips most of the masked triangle, and the scores stay in L2
)
# A group of decoding sequences ends where the next is shorter than this share of its longest, or
# where the pages gathered for one layer would leave the cache before attention reads them.
MIN_LENGTH_RATIO = 0.85
MAX_GATHER_BYTES = 4 << 20

BlockTable = npt.NDArray[np.int64]  # [blocks of the sequence], exactly those that hold its context

# attend(query [rows, heads, dim], layer, out [rows, heads, dim]) fills those rows of `out` that it
# covers.
AttentionOp = Callable[[torch.Tensor, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What one sequence attends to: its blocks, and how many tokens of them count."""

    block_table: BlockTable
    length: int
    hidden_tokens: int = (
        0  # of those, the first that lie behind the window of the oldest query; fewer than a block
    )


def clip_to_window(
    context: AttentionContext, window: int | None, queries: int, block_size: int
) -> AttentionContext:
    """What the newest `queries` tokens of a whole context attend to when each sees itself and the
    `window` - 1 tokens before it: blocks that none of them sees are left out."""
    behind = 0 if window is None else max(0, context.length - queries + 1 - window)
    if behind == 0:
        return context
    skipped = behind // block_size
    return AttentionContext(
        context.block_table[skipped:], context.length - skipped * block_size, behind % block_size
    )


def compute_page_rows(cache: PagedCache, tables: npt.NDArray[np.int64]) -> torch.Tensor:
    """tables [sequences, n] -> int64 [2 * sequences * kv_heads * n]: [k|v, sequence, head, n],
    flattened."""
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
    return pages.view(2, sequences, cache.kv_heads, -1, cache.arena.shape[5]).unbind()


@dataclass(frozen=True, slots=True)
class PaddedDecodeAttention:
    """One query per sequence, for sequences of similar length, padded to the longest."""

    cache: PagedCache
    first_query: int  # queries first..last of the step
    end_query: int
    page_rows: torch.Tensor  # int64 [2 * sequences * kv_heads * blocks]
    mask: torch.Tensor | None  # [sequences, 1, 1, tokens], 0 or -inf; None when nothing is hidden

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """The heads that share a KV head are folded into the query length: with query length 1 in
        bf16, `enable_gqa` is an order of magnitude slower."""
        key, value = gather_pages(
            self.cache, layer, self.page_rows, self.end_query - self.first_query
        )
        folded = (self.cache.kv_heads, -1)
        mine = query[self.first_query : self.end_query].unflatten(1, folded)
        attended = F.scaled_dot_product_attention(mine, key, value, attn_mask=self.mask)
        out[self.first_query : self.end_query].unflatten(1, folded).copy_(attended)


def _decode_group(
    cache: PagedCache, first: int, contexts: Sequence[AttentionContext], dtype: torch.dtype
) -> PaddedDecodeAttention:
    blocks = max(len(context.block_table) for context in contexts)
    tokens = blocks * cache.block_size
    # Padding repeats the sequence's own blocks, so that it never reads a block of somebody else.
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
    contexts: Sequence[
        AttentionContext
    ],  # longest first, give or take a block; query i attends to contexts[i]
    dtype: torch.dtype,  # of the queries
) -> list[AttentionOp]:
    """Attention of one query per sequence, for every layer of a step."""
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
    """[QUERY_TILE, reach + QUERY_TILE], additive. Its last columns are the triangle of a tile
    against itself, those before are open: a tile from position p of its sequence on uses the
    columns from reach - p on."""
    mask = torch.zeros(QUERY_TILE, reach + QUERY_TILE, dtype=dtype)
    mask[:, reach:] = torch.full((QUERY_TILE, QUERY_TILE), -math.inf).triu_(1)
    return mask.to(device)


def window_mask(window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A causal_mask with reach window - 1 whose queries see themselves and the window - 1 tokens
    before them: row i is open from column i to column i + window - 1."""
    mask = causal_mask(window - 1, dtype, torch.device("cpu"))
    return mask.add_(torch.full_like(mask, -math.inf).tril_(-1)).to(device)


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask [queries, keys] whose rows begin where CUDA's kernels can read 16 bytes at a time.
    torch sees to the length of rows, not to where those of a slice begin, and a misaligned read
    ends the process's use of the GPU."""
    misaligned = mask.data_ptr() % 16 or mask.stride(0) * mask.element_size() % 16
    return mask.clone() if mask.is_cuda and misaligned else mask


@dataclass(frozen=True, slots=True)
class TiledPrefillAttention:
    """Causal attention of one chunk over its paged prefix and itself; its own KV is in the arena
    already. A tile sees nothing that is further before it than the mask reaches."""

    cache: PagedCache
    first_query: int  # queries first..last of the step
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
                attn_mask=_aligned(
                    self.mask[: last - first, reach - position + begin : reach - position + end]
                ),
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
    """Attention of queries first .. first + count, the newest of one sequence, for every layer of a
    step."""
    rows = compute_page_rows(cache, context.block_table[None])
    return TiledPrefillAttention(cache, first, first + count, context.length - count, rows, mask)
