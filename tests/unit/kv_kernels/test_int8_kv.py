"""KV in int8 in torch: how rows lie in the arena, and attention over them."""

import math

import numpy as np
import pytest
import torch

from kv_kernels.reference.int8_kv import SCALE_BYTES, decode_rows, encode_rows
from kv_kernels.reference.int8_linear import quantize_rows
from kv_kernels.reference.paged_attention import (
    AttentionContext,
    PagedCache,
    SlotMapping,
    causal_mask,
    clear_blocks,
    copy_blocks,
    plan_decode,
    plan_prefill,
    write_kv,
)

BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, DIM = 8, 3, 2, 16, 32
SHAPE = (BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE)
LAYER = 1
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_caches(dtype: torch.dtype) -> tuple[PagedCache, PagedCache]:
    """An int8 cache, and one of `dtype` with the same numbers."""
    encoded = encode_rows(draw(*SHAPE, DIM).to(dtype))
    return (
        PagedCache.from_arena(encoded, dtype),
        PagedCache.from_arena(decode_rows(encoded, dtype)),
    )


def test_the_scale_stands_behind_the_values() -> None:
    kv = draw(3, 4, DIM)
    rows = encode_rows(kv)
    quantized = quantize_rows(kv)
    assert rows.shape == (3, 4, DIM + SCALE_BYTES)
    assert torch.equal(rows[..., :DIM], quantized.values)
    scales = np.frombuffer(rows[..., DIM:].contiguous().numpy().tobytes(), np.float32)
    assert scales.tolist() == quantized.scales.flatten().tolist()
    assert torch.equal(decode_rows(rows, torch.float32), quantized.dequantize())
    assert torch.equal(decode_rows(rows, torch.bfloat16), quantized.dequantize().bfloat16())


def test_zero_bytes_are_zeros_and_damage_is_kept() -> None:
    rows = torch.zeros(2, DIM + SCALE_BYTES, dtype=torch.int8)
    assert not decode_rows(rows, torch.float32).any()
    for damage in (math.nan, math.inf):
        kv = draw(2, DIM)
        kv[1, 3] = damage
        finite = decode_rows(encode_rows(kv), torch.bfloat16).isfinite()
        assert finite[0].all()
        assert not finite[1].any()


@DTYPES
def test_write_touches_nothing_but_its_slots(dtype: torch.dtype) -> None:
    cache, _ = make_caches(dtype)
    before = cache.arena.clone()
    wide = draw(3, 5 + 2 * KV_HEADS, DIM, seed=1).to(dtype)
    kv = wide[:, 5:]  # a slice of the fused projection: rows are not adjacent
    blocks, offsets = torch.tensor([1, 5, 1]), torch.tensor([0, 2, 3])
    write_kv(kv, cache, LAYER, SlotMapping(blocks, offsets))
    for i in range(3):
        rows = encode_rows(kv[i]).view(2, KV_HEADS, DIM + SCALE_BYTES)
        before[blocks[i], LAYER, :, :, offsets[i]] = rows
    assert torch.equal(cache.arena, before)


@DTYPES
def test_decode_attention_is_that_over_decoded_rows(dtype: torch.dtype) -> None:
    cache, decoded = make_caches(dtype)
    contexts = [
        AttentionContext(np.array([5, 0, 3]), 48),
        AttentionContext(np.array([1, 2, 6]), 41),
        AttentionContext(np.array([7]), 3),
    ]
    query = draw(3, 6, DIM, seed=1).to(dtype)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    assert cache.token_bytes == decoded.token_bytes
    for part, twin in zip(
        plan_decode(cache, contexts, dtype), plan_decode(decoded, contexts, dtype), strict=True
    ):
        part(query, LAYER, found)
        twin(query, LAYER, expected)
    assert torch.equal(found, expected)


@DTYPES
def test_prefill_attention_is_that_over_decoded_rows(dtype: torch.dtype) -> None:
    cache, decoded = make_caches(dtype)
    context = AttentionContext(np.array([5, 0, 3]), 45)
    mask = causal_mask(256, dtype, torch.device("cpu"))
    query = draw(20, 6, DIM, seed=1).to(dtype)
    found, expected = torch.empty_like(query), torch.empty_like(query)
    plan_prefill(cache, 0, 20, context, mask)(query, LAYER, found)
    plan_prefill(decoded, 0, 20, context, mask)(query, LAYER, expected)
    assert torch.equal(found, expected)


def test_blocks_are_copied_and_cleared() -> None:
    cache, _ = make_caches(torch.float32)
    expected = cache.arena.clone()
    expected[4] = cache.arena[2]
    expected[[3, 0]] = 0
    copy_blocks(cache.arena, torch.tensor([2]), torch.tensor([4]))
    clear_blocks(cache.arena, torch.tensor([3, 0]))
    assert torch.equal(cache.arena, expected)
