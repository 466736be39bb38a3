"""The torch attention kernels, compared with dense attention in double precision."""

import itertools

import numpy as np
import pytest
import torch

from kv_kernels.reference import paged_attention
from kv_kernels.reference.paged_attention import (
    AttentionContext,
    PaddedDecodeAttention,
    PagedCache,
    causal_mask,
    clip_to_window,
    plan_decode,
    plan_prefill,
    window_mask,
)

LAYER = 1
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make_cache(
    lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[PagedCache, list[AttentionContext]]:
    """A cache of shuffled blocks: zeros behind each sequence's end, NaN in unused blocks."""
    generator = torch.Generator().manual_seed(0)
    widths = [-(-length // block_size) for length in lengths]
    total = sum(widths)
    arena = torch.randn(total + 2, 3, 2, kv_heads, block_size, dim, generator=generator).to(dtype)
    order = torch.randperm(total + 2, generator=generator).numpy()
    arena[order[total:]] = torch.nan
    contexts = []
    for length, blocks in zip(
        lengths, np.split(order[:total], np.cumsum(widths)[:-1]), strict=True
    ):
        arena[blocks[-1], :, :, :, (length - 1) % block_size + 1 :] = 0.0
        contexts.append(AttentionContext(blocks, length))
    return PagedCache.from_arena(arena), contexts


def dense_attention(
    query: torch.Tensor, cache: PagedCache, context: AttentionContext, window: int | None = None
) -> torch.Tensor:
    """Attention of `query` [n, heads, dim], the newest n tokens of a context: [n, heads, dim]."""
    blocks = cache.arena[torch.from_numpy(context.block_table), LAYER].double()
    key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : context.length]
    group = query.shape[1] // cache.kv_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query.double().transpose(0, 1) @ key.transpose(1, 2) / query.shape[2] ** 0.5
    position = torch.arange(context.length - len(query), context.length)
    scores.masked_fill_(torch.arange(context.length) > position[:, None], -torch.inf)
    if window is not None:
        scores.masked_fill_(torch.arange(context.length) <= position[:, None] - window, -torch.inf)
    attended: torch.Tensor = (scores.softmax(-1) @ value).transpose(0, 1)
    return attended


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [[1], [64], [33, 32, 31], [300, 70, 65, 16, 5, 1], [48] * 5],
    ids=["one token", "full blocks", "one group", "several groups", "nothing padded"],
)
def test_decode_equals_dense_attention(lengths: list[int], dtype: torch.dtype) -> None:
    cache, contexts = make_cache(lengths, kv_heads=2, dim=32, block_size=16, dtype=dtype)
    wide = torch.randn(len(lengths), 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    query = wide[:, :6]  # a slice of the fused projection: rows are not adjacent
    out = torch.full(query.shape, torch.nan, dtype=dtype)
    for part in plan_decode(cache, contexts, dtype):
        part(query, LAYER, out)
    expected = torch.cat(
        [dense_attention(query[i : i + 1], cache, c) for i, c in enumerate(contexts)]
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0.0)


def group_bounds(cache: PagedCache, contexts: list[AttentionContext]) -> list[tuple[int, int]]:
    groups = plan_decode(cache, contexts, torch.float32)
    return [
        (group.first_query, group.end_query)
        for group in groups
        if isinstance(group, PaddedDecodeAttention)
    ]


def test_groups_end_with_similar_lengths_and_with_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, contexts = make_cache(
        [100, 99, 50, 49, 49], kv_heads=1, dim=8, block_size=16, dtype=torch.float32
    )
    assert group_bounds(cache, contexts) == [(0, 2), (2, 5)]
    monkeypatch.setattr(paged_attention, "MAX_GATHER_BYTES", 2 * 50 * cache.token_bytes)
    assert group_bounds(cache, contexts) == [(0, 1), (1, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, 64), (0, 150), (16, 64), (37, 65), (200, 2)]
)
def test_prefill_equals_dense_attention(start: int, count: int, dtype: torch.dtype) -> None:
    cache, [context] = make_cache([start + count], kv_heads=2, dim=32, block_size=16, dtype=dtype)
    query = torch.randn(count + 3, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)[
        :, :6
    ]
    out = torch.full(query.shape, torch.nan, dtype=dtype)
    mask = causal_mask(256, dtype, torch.device("cpu"))
    plan_prefill(cache, 2, count, context, mask)(query, LAYER, out)
    torch.testing.assert_close(
        out[2:-1].double(),
        dense_attention(query[2:-1], cache, context),
        atol=TOLERANCE[dtype],
        rtol=0.0,
    )
    assert out[:2].isnan().all()
    assert out[-1].isnan().all()


def poison_outside_window(
    cache: PagedCache, context: AttentionContext, window: int, queries: int
) -> AttentionContext:
    """The visible part of a context. Fills the blocks that no query sees with NaN."""
    seen = clip_to_window(context, window, queries, cache.block_size)
    oldest = context.length - queries - window + 1  # position of the first query's oldest token
    assert len(context.block_table) - len(seen.block_table) == max(0, oldest) // cache.block_size
    cache.arena[context.block_table[: -len(seen.block_table)]] = torch.nan
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 16, 37, 300])
def test_windowed_decode_reads_the_window_alone(window: int, dtype: torch.dtype) -> None:
    lengths = [301, 300, 128, 54, 53, 38, 37, 36, 16, 1]
    cache, contexts = make_cache(lengths, kv_heads=2, dim=32, block_size=16, dtype=dtype)
    query = torch.randn(len(lengths), 6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.cat(
        [dense_attention(query[i : i + 1], cache, c, window) for i, c in enumerate(contexts)]
    )
    seen = [poison_outside_window(cache, context, window, 1) for context in contexts]
    out = torch.full(query.shape, torch.nan, dtype=dtype)
    for part in plan_decode(cache, seen, dtype):
        part(query, LAYER, out)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 37, 64, 100, 400])
@pytest.mark.parametrize(("start", "count"), [(0, 2), (0, 150), (37, 65), (200, 130)])
def test_windowed_prefill_reads_the_window_alone(
    start: int, count: int, window: int, dtype: torch.dtype
) -> None:
    cache, [context] = make_cache([start + count], kv_heads=2, dim=32, block_size=16, dtype=dtype)
    query = torch.randn(count, 6, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = dense_attention(query, cache, context, window)
    seen = poison_outside_window(cache, context, window, count)
    out = torch.full(query.shape, torch.nan, dtype=dtype)
    mask = window_mask(window, dtype, torch.device("cpu"))
    plan_prefill(cache, 0, count, seen, mask)(query, LAYER, out)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=0.0)


def test_a_sequence_reads_only_its_own_blocks() -> None:
    lengths = [40, 39, 20]
    cache, contexts = make_cache(lengths, kv_heads=1, dim=8, block_size=16, dtype=torch.float32)
    query = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1))

    def answers() -> list[torch.Tensor]:
        out = torch.empty_like(query)
        for part in plan_decode(cache, contexts, torch.float32):
            part(query, LAYER, out)
        return list(out)

    before = answers()
    for spoilt, other in itertools.permutations(range(3), 2):
        saved = cache.arena[contexts[spoilt].block_table].clone()
        cache.arena[contexts[spoilt].block_table] = torch.nan
        assert torch.equal(answers()[other], before[other])
        cache.arena[contexts[spoilt].block_table] = saved
