"""KV write in Triton. `write_kv` in reference/paged_attention.py does the same in torch."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from kv_kernels.reference.paged_attention import PagedCache, SlotMapping


# grid: [tokens, 2 * kv_heads]
@triton.jit
def _write_kv_kernel(
    kv,  # [tokens, 2 * kv_heads, dim], a token's heads contiguous
    slab,  # [blocks, 2 * kv_heads, block_size, dim], all but blocks contiguous
    blocks,  # int64 [tokens]
    offsets,  # int64 [tokens]
    token_stride,  # elements between tokens of kv
    block_stride,  # elements between blocks of slab
    DIM: tl.constexpr,
    DIMS: tl.constexpr,  # DIM, rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    row = tl.load(kv + token * token_stride + head * DIM + dim, mask=dim < DIM)
    place = head * BLOCK_SIZE + tl.load(offsets + token)
    cell = slab + tl.load(blocks + token) * block_stride + place * DIM
    tl.store(cell + dim, row, mask=dim < DIM)


def write_kv(
    kv: torch.Tensor,  # [tokens, 2 * kv_heads, dim], the keys of all heads before the values
    cache: PagedCache,
    layer: int,
    slots: SlotMapping,
) -> None:
    """Write keys and values of a step's tokens into one layer of the arena."""
    tokens, heads, dim = kv.shape
    slab = cache.layer_slabs[layer]
    _write_kv_kernel[(tokens, heads)](
        kv,
        slab,
        slots.blocks,
        slots.offsets,
        kv.stride(0),
        slab.stride(0),
        DIM=dim,
        DIMS=triton.next_power_of_2(dim),
        BLOCK_SIZE=cache.block_size,
    )
