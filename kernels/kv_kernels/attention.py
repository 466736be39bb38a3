"""Attention over a paged cache as plain torch: the oracle, and the path of the CPU.

Pages are gathered once per layer by one `index_select` over the arena seen as rows of (block, layer, k|v, head), so
that keys and values of a sequence come out as `[kv_heads, tokens, dim]` without a transposition. The row numbers of
layer 0 are found once per step; layer l is the same rows of a view that starts l layers later.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

QUERY_TILE = 64  # queries per call: skips most of the masked triangle, and the scores stay in L2
MAX_PADDING = 0.75  # a sequence shorter than this share of its group's longest opens a new group

BlockTable = npt.NDArray[np.int64]  # [blocks of the sequence], exactly those that hold its context


@dataclass(frozen=True, slots=True)
class Context:
    """What one sequence attends to: its blocks, and how many tokens of them count."""

    blocks: BlockTable
    length: int


# attend(query [rows, heads, dim], layer, out [rows, heads, dim]): fills the rows of `out` that its plan covers
Attend = Callable[[torch.Tensor, int, torch.Tensor], None]


def _rows(arena: torch.Tensor, tables: npt.NDArray[np.int64]) -> torch.Tensor:
    """tables [sequences, n] -> rows of layer 0 in the order [k|v, sequence, kv_head, n]."""
    _, layers, _, heads, _, _ = arena.shape
    parts = np.arange(2, dtype=np.int64).reshape(2, 1, 1, 1) * heads
    head = np.arange(heads, dtype=np.int64).reshape(1, 1, heads, 1)
    rows = tables[None, :, None, :] * (layers * 2 * heads) + parts + head
    return torch.from_numpy(rows.reshape(-1)).to(arena.device)


def _gather(arena: torch.Tensor, layer: int, rows: torch.Tensor, sequences: int) -> torch.Tensor:
    """-> [2, sequences, kv_heads, tokens, dim]."""
    _, _, _, heads, block_size, dim = arena.shape
    table = arena.view(-1, block_size * dim)[layer * 2 * heads :]
    return table.index_select(0, rows).view(2, sequences, heads, -1, dim)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One query per sequence, for sequences of similar length, padded to the longest."""

    arena: torch.Tensor  # [blocks, layers, 2, kv_heads, block_size, dim]
    first: int  # queries first..last of the step
    last: int
    rows: torch.Tensor  # int64 [2 * sequences * kv_heads * blocks]
    mask: torch.Tensor | None  # [sequences, 1, 1, tokens], 0 or -inf; None when nothing is padded

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """The heads that share a KV head are folded into the query length: with query length 1 in bf16, `enable_gqa`
        is an order of magnitude slower."""
        _, heads, dim = query.shape
        kv_heads = self.arena.shape[3]
        sequences = self.last - self.first
        folded = (sequences, kv_heads, heads // kv_heads, dim)
        key, value = _gather(self.arena, layer, self.rows, sequences)
        rows = slice(self.first, self.last)
        attended = F.scaled_dot_product_attention(query[rows].view(folded), key, value, attn_mask=self.mask)
        out[rows].view(folded).copy_(attended)


def _group(arena: torch.Tensor, first: int, contexts: Sequence[Context], dtype: torch.dtype) -> DecodeGroup:
    tokens = max(len(context.blocks) for context in contexts) * arena.shape[4]
    # Padding repeats the sequence's own blocks, so that it never reads a block of somebody else.
    tables = np.stack([np.resize(context.blocks, tokens // arena.shape[4]) for context in contexts])
    lengths = torch.tensor([context.length for context in contexts])
    mask = None
    if int(lengths.min()) < tokens:
        hidden = torch.arange(tokens) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)[:, None, None].to(arena.device)
    return DecodeGroup(arena, first, first + len(contexts), _rows(arena, tables), mask)


def plan_decode(
    arena: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, dim]
    contexts: Sequence[Context],  # longest first; query i attends to contexts[i]
    dtype: torch.dtype,  # of the queries
) -> list[Attend]:
    """One query per sequence. Found once per step, used by every layer."""
    groups: list[Attend] = []
    first = 0
    for row in range(1, len(contexts) + 1):
        if row == len(contexts) or contexts[row].length < MAX_PADDING * contexts[first].length:
            groups.append(_group(arena, first, contexts[first:row], dtype))
            first = row
    return groups


def causal_mask(reach: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[QUERY_TILE, reach + QUERY_TILE], additive. Its last columns are the triangle of a tile against itself, those
    before are open: a tile that starts at position p of its sequence uses the columns from reach - p on."""
    mask = torch.zeros(QUERY_TILE, reach + QUERY_TILE, dtype=dtype)
    mask[:, reach:] = torch.full((QUERY_TILE, QUERY_TILE), -math.inf).triu_(1)
    return mask.to(device)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Causal attention of one chunk over its paged prefix and itself, whose KV is in the arena already."""

    arena: torch.Tensor  # [blocks, layers, 2, kv_heads, block_size, dim]
    first: int  # queries first..last of the step
    last: int
    start: int  # position of query `first` in its sequence
    rows: torch.Tensor  # int64 [2 * kv_heads * blocks]
    mask: torch.Tensor  # causal_mask with reach >= the context's length

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        key, value = _gather(self.arena, layer, self.rows, 1)
        reach = self.mask.shape[1] - QUERY_TILE
        for first in range(self.first, self.last, QUERY_TILE):
            rows = slice(first, min(self.last, first + QUERY_TILE))
            count = rows.stop - first
            position = self.start + first - self.first
            end = position + count
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                key[:, :, :end],
                value[:, :, :end],
                attn_mask=self.mask[:count, reach - position : reach + count],
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out[rows].copy_(attended[0].transpose(0, 1))


def plan_prefill(
    arena: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, dim]
    first: int,
    count: int,
    context: Context,  # ends with the chunk's last token
    mask: torch.Tensor,  # causal_mask with reach >= context.length
) -> Attend:
    """Queries first .. first + count of the step are one sequence's newest. Found once per step."""
    rows = _rows(arena, context.blocks[None])
    return PrefillChunk(arena, first, first + count, context.length - count, rows, mask)
