"""Causal attention of a chunk by one of torch's fused kernels, for a GPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kv_kernels.attention import QUERY_TILE, Attend, Context, gather_pages, page_rows, plan_prefill
from kv_kernels.paged_cache import PagedCache


@dataclass(frozen=True, slots=True)
class CausalChunk:
    """As `PrefillChunk`, in one call without a mask: one fused kernel on a GPU, where each tile would be a
    launch, and one with a mask and grouped heads none that is fused."""

    cache: PagedCache
    first: int  # queries first..last of the step
    last: int
    length: int  # tokens of the context, which ends with the chunk
    rows: torch.Tensor  # int64 [2 * kv_heads * blocks]

    def __call__(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        key, value = (each[:, :, : self.length] for each in gather_pages(self.cache, layer, self.rows, 1))
        group = query.shape[1] // key.shape[1]
        if query.dtype is torch.float32 and group > 1:
            # The fused kernel that takes float32 takes no grouped heads.
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        attended = F.scaled_dot_product_attention(
            query[self.first : self.last].transpose(0, 1)[None],
            key,
            value,
            attn_mask=causal_lower_right(self.last - self.first, self.length),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[self.first : self.last].copy_(attended[0].transpose(0, 1))


def plan_prefill_at_once(
    cache: PagedCache,
    first: int,
    count: int,
    context: Context,
    mask: torch.Tensor,
) -> Attend:
    """As `plan_prefill`, in one call unless a query outgrows the mask, as within a window."""
    if context.length - 1 > mask.shape[1] - QUERY_TILE:
        return plan_prefill(cache, first, count, context, mask)
    rows = page_rows(cache, context.blocks[None])
    return CausalChunk(cache, first, first + count, context.length, rows)
