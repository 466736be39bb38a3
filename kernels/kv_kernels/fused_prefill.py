"""Causal attention of a prefill chunk by one of torch's fused kernels, for a GPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kv_kernels.reference.paged_attention import (
    QUERY_TILE,
    AttentionContext,
    AttentionOp,
    PagedCache,
    compute_page_rows,
    gather_pages,
    plan_prefill,
)


@dataclass(frozen=True, slots=True)
class FusedPrefillAttention:
    """What `TiledPrefillAttention` computes, in one call without a mask, which is one fused kernel.

    On a GPU each tile would be a launch, and torch has no fused kernel for a mask with grouped
    heads."""

    cache: PagedCache
    first_query: int  # of the step's queries, as is the next
    end_query: int
    context_tokens: int  # tokens of the context, which ends with the chunk
    page_rows: torch.Tensor  # int64 [2 * kv_heads * blocks]

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        key, value = (
            states[:, :, : self.context_tokens]
            for states in gather_pages(self.cache, layer, self.page_rows, 1)
        )
        group = query.shape[1] // key.shape[1]
        if query.dtype is torch.float32 and group > 1:
            # The fused kernel for float32 does not take grouped heads.
            key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
        attended = F.scaled_dot_product_attention(
            query[self.first_query : self.end_query].transpose(0, 1)[None],
            key,
            value,
            attn_mask=causal_lower_right(self.end_query - self.first_query, self.context_tokens),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[self.first_query : self.end_query].copy_(attended[0].transpose(0, 1))


def plan_fused_prefill(
    cache: PagedCache,
    first: int,
    count: int,
    context: AttentionContext,
    mask: torch.Tensor,
) -> AttentionOp:
    """What `plan_prefill` does, in one call unless a window hides a part of the context."""
    if context.length - 1 > mask.shape[1] - QUERY_TILE:
        return plan_prefill(cache, first, count, context, mask)
    rows = compute_page_rows(cache, context.block_table[None])
    return FusedPrefillAttention(cache, first, first + count, context.length, rows)
