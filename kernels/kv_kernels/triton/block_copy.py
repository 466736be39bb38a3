"""Copies between two arenas of the same layout, in Triton: one on the GPU, one in host memory.

Host memory that is pinned and mapped is read and written by the kernel itself, over PCIe, which is
as fast as a copy engine and takes any list of blocks in one launch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # words that one program copies at a time
_PROGRAMS = 64  # that copy one block, at most


# grid: [blocks, programs]
@triton.jit
def _copy_kernel(
    source,  # int64 words of the whole arena
    target,
    blocks,  # int32 [n]
    block_words,  # words between two blocks
    first_word,  # of what is copied of each block
    words,  # of each block
    BLOCK: tl.constexpr,
):
    base = tl.load(blocks + tl.program_id(0)).to(tl.int64) * block_words + first_word
    for begin in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
        word = begin + tl.arange(0, BLOCK)
        inside = word < words
        tl.store(target + base + word, tl.load(source + base + word, mask=inside), mask=inside)


def copy_blocks_between(
    source: torch.Tensor,  # arena [blocks, layers, 2, kv_heads, block_size, dim], contiguous
    target: torch.Tensor,  # arena with blocks of the same shape
    blocks: torch.Tensor,  # int32 [n], the same numbers in both arenas
    layer: int | None = None,
) -> None:
    """Copy whole blocks, or only one layer of them. A slab has to be a multiple of 8 bytes."""
    slab_words = source[0, 0].numel() * source.itemsize // 8
    block_words = source.shape[1] * slab_words
    words = block_words if layer is None else slab_words
    if not len(blocks):
        return
    _copy_kernel[(len(blocks), min(_PROGRAMS, triton.cdiv(words, _BLOCK)))](
        source.view(-1).view(torch.int64),
        target.view(-1).view(torch.int64),
        blocks,
        block_words,
        0 if layer is None else layer * slab_words,
        words,
        BLOCK=_BLOCK,
    )
