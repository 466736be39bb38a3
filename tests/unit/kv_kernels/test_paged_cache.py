"""The operations of the paged cache, on small arenas."""

import pytest
import torch

from kv_kernels.reference.paged_attention import (
    PagedCache,
    SlotMapping,
    clear_blocks,
    copy_blocks,
    gather_slabs,
    scatter_slabs,
    write_kv,
)

BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, DIM = 6, 3, 2, 4, 8


@pytest.fixture
def arena() -> torch.Tensor:
    shape = (BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_memory_order_is_block_layer_part_head_token_dim(arena: torch.Tensor) -> None:
    block, layer, head, token = 4, 2, 1, 3
    kv = torch.arange(2 * KV_HEADS * DIM, dtype=torch.float32).view(1, 2 * KV_HEADS, DIM) + 100.0
    write_kv(
        kv,
        PagedCache.from_arena(arena),
        layer,
        SlotMapping(torch.tensor([block]), torch.tensor([token])),
    )
    flat = arena.view(-1)
    for part in (0, 1):
        row = (((block * LAYERS + layer) * 2 + part) * KV_HEADS + head) * BLOCK_SIZE + token
        assert torch.equal(flat[row * DIM : (row + 1) * DIM], kv[0, part * KV_HEADS + head])


def test_write_touches_nothing_but_its_slots(arena: torch.Tensor) -> None:
    before = arena.clone()
    wide = torch.randn(3, 5 + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    kv = wide[:, 5:]  # a slice of the fused projection: rows are not adjacent
    blocks, offsets = torch.tensor([1, 5, 1]), torch.tensor([0, 2, 3])
    write_kv(kv, PagedCache.from_arena(arena), 1, SlotMapping(blocks, offsets))
    for i in range(3):
        written = arena[blocks[i], 1, :, :, offsets[i]]
        assert torch.equal(written, kv[i].view(2, KV_HEADS, DIM))
        before[blocks[i], 1, :, :, offsets[i]] = written
    assert torch.equal(arena, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_scatter_is_the_inverse_of_gather(arena: torch.Tensor, dtype: torch.dtype) -> None:
    source = arena.to(dtype) if dtype.is_floating_point else arena.view(dtype)
    blocks, target = torch.tensor([4, 0, 3]), torch.tensor([1, 5, 2])
    staging = torch.empty(3, *source.shape[2:], dtype=dtype)
    gather_slabs(source, 2, blocks, staging)
    assert torch.equal(staging, source[blocks, 2])
    expected = source.clone()
    expected[target, 1] = source[blocks, 2]
    scatter_slabs(source, 1, target, staging)
    assert torch.equal(source, expected)


def test_copies_read_before_they_write(arena: torch.Tensor) -> None:
    expected = arena.clone()
    expected[[1, 2]] = arena[[0, 1]]
    copy_blocks(arena, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert torch.equal(arena, expected)


def test_clear_zeroes_whole_blocks_even_of_nan(arena: torch.Tensor) -> None:
    arena[3] = torch.nan
    expected = arena.clone()
    expected[[3, 0]] = 0.0
    clear_blocks(arena, torch.tensor([3, 0]))
    assert torch.equal(arena, expected)
