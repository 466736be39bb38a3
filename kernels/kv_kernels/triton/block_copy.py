"""Copies of blocks between two arenas of the same layout, in Triton, and their checksums.

Host memory that is pinned and mapped is read and written by the kernel itself, over PCIe, which is
as fast as a copy engine and takes any list of blocks in one launch. A checksum costs no pass of its
own: it is computed from what the copy reads. `reference/block_checksums.py` computes the same.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kv_kernels.reference.block_checksums import POSITION_FACTOR

_BLOCK = 1024  # words that one program copies at a time
_PROGRAMS = 64  # that copy one block, at most


@triton.jit
def _mix(word):
    """The finalizer of MurmurHash3 (Appleby, 2011): a bijection of 64-bit words."""
    word = (word ^ (word >> 33)) * 0xFF51AFD7ED558CCD
    word = (word ^ (word >> 33)) * 0xC4CEB9FE1A85EC53
    return word ^ (word >> 33)


# grid: [blocks, programs]
@triton.jit(do_not_specialize=["sums_stride", "first_part", "first_position"])
def _copy_kernel(
    source,  # int64 words of the whole arena
    target,  # int64 words of the other one
    source_blocks,  # int32 [n]
    target_blocks,  # int32 [n]
    sums,  # int64 [n, sums_stride]: parts of the checksums
    source_stride,  # words between two blocks of the source
    target_stride,
    source_first,  # word of each block that is copied first
    target_first,  # where it is written in a block of the target
    words,  # of each block
    position_factor,
    sums_stride,  # parts of one checksum, of all launches that make it
    first_part,  # that this launch writes
    first_position,  # of its first word, in what the checksum covers
    BLOCK: tl.constexpr,
    COPIES: tl.constexpr,
    SUMS: tl.constexpr,
):
    block, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    read = tl.load(source_blocks + block).to(tl.int64) * source_stride + source_first
    written = tl.load(target_blocks + block).to(tl.int64) * target_stride + target_first
    total = tl.zeros([BLOCK], tl.uint64)
    for begin in range(program * BLOCK, words, programs * BLOCK):
        word = begin + tl.arange(0, BLOCK)
        inside = word < words
        value = tl.load(source + read + word, mask=inside)
        if COPIES:
            tl.store(target + written + word, value, mask=inside)
        if SUMS:
            place = (word + first_position).to(tl.uint64) * position_factor.to(
                tl.uint64, bitcast=True
            )
            mixed = _mix(value.to(tl.uint64, bitcast=True) ^ place)
            total += tl.where(inside, mixed, tl.zeros_like(mixed))
    if SUMS:
        part = tl.sum(total, 0).to(tl.int64, bitcast=True)
        tl.store(sums + block * sums_stride + first_part + program, part)


def copy_blocks_between(
    source: torch.Tensor,  # arena [blocks, layers, 2, kv_heads, block_size, dim], contiguous
    target: torch.Tensor,  # arena with blocks of the same shape
    blocks: torch.Tensor,  # int32 [n], the same numbers in both arenas
    layer: int | None = None,
) -> None:
    """Copy whole blocks, or only one layer of them. A slab has to be a multiple of 8 bytes."""
    _launch(source, target, blocks, blocks, layer, sums=False)


def move_blocks(
    source: torch.Tensor,  # arena [blocks, layers, 2, kv_heads, block_size, dim], contiguous
    target: torch.Tensor,  # the same, of any number of blocks
    source_blocks: torch.Tensor,  # int32 [n]
    target_blocks: torch.Tensor,  # int32 [n]
    layer: int | None = None,
) -> torch.Tensor:  # int64 [n]
    """Copy blocks to places with other numbers: gather or scatter; returns their checksums."""
    return _launch(source, target, source_blocks, target_blocks, layer, sums=True)


def compute_block_checksums(
    arena: torch.Tensor,  # [blocks, layers, 2, kv_heads, block_size, dim], contiguous
    blocks: torch.Tensor,  # int32 [n]
    layer: int | None = None,
) -> torch.Tensor:  # int64 [n]
    """Checksums of blocks, or of one layer of them, where they are."""
    return _launch(arena, None, blocks, blocks, layer, sums=True)


@dataclass(frozen=True, slots=True)
class SlabPlaces:
    """Where the copied words of each block are in an arena of int64 words."""

    words: torch.Tensor  # int64 [words of the arena]
    block_words: int  # between two blocks
    first_word: int  # of each block, that is copied first

    def skip(self, words: int) -> "SlabPlaces":
        """The places behind so many words of each block."""
        return replace(self, first_word=self.first_word + words)


@dataclass(frozen=True, slots=True)
class ChecksumParts:
    """Where a launch writes its parts of the checksums, if several make them."""

    parts: torch.Tensor  # int64 [n, parts of all launches]; a checksum is the sum of its parts
    first_part: int = 0  # of this launch
    first_position: int = 0  # of its first word, in what a checksum covers

    def skip(self, words: int) -> "ChecksumParts":
        """For the next launch, after one over so many words of each block."""
        first_part = self.first_part + count_checksum_parts(words)
        return replace(self, first_part=first_part, first_position=self.first_position + words)


def count_checksum_parts(words: int) -> int:
    """How many parts a launch over `words` words of each block writes of a block's checksum."""
    return min(_PROGRAMS, -(-words // _BLOCK))


def launch_slab_move(
    source: SlabPlaces,
    target: SlabPlaces | None,
    source_blocks: torch.Tensor,  # int32 [n]
    target_blocks: torch.Tensor,  # int32 [n]
    words: int,  # of each block
    checksums: ChecksumParts,
    *,
    num_warps: int = 4,
) -> None:
    """Copy words of n blocks, at least one, and write parts of their checksums, in one launch.

    It writes `count_checksum_parts(words)` parts. Without a target, only the checksums are
    computed. All tensors may be in pinned host memory that is mapped for the device: nothing else
    is launched and nothing is allocated.
    """
    written = source if target is None else target
    _copy_kernel[(len(source_blocks), count_checksum_parts(words))](
        source.words,
        written.words,
        source_blocks,
        target_blocks,
        checksums.parts,
        source.block_words,
        written.block_words,
        source.first_word,
        written.first_word,
        words,
        POSITION_FACTOR - (1 << 64),
        checksums.parts.shape[1],
        checksums.first_part,
        checksums.first_position,
        BLOCK=_BLOCK,
        COPIES=target is not None,
        SUMS=True,
        num_warps=num_warps,
    )


def _launch(
    source: torch.Tensor,
    target: torch.Tensor | None,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
    layer: int | None,
    *,
    sums: bool,
) -> torch.Tensor:
    """Launch the kernel; returns the checksums, or nothing of use without `sums`."""
    slab_words = source[0, 0].numel() * source.itemsize // 8
    block_words = source.shape[1] * slab_words
    words = block_words if layer is None else slab_words
    first = 0 if layer is None else layer * slab_words
    programs = count_checksum_parts(words)
    count = len(source_blocks)
    parts = torch.empty(count, programs if sums else 1, dtype=torch.int64, device=source.device)
    if count:
        _copy_kernel[(count, programs)](
            source.view(-1).view(torch.int64),
            (source if target is None else target).view(-1).view(torch.int64),
            source_blocks,
            target_blocks,
            parts,
            block_words,
            block_words,
            first,
            first,
            words,
            POSITION_FACTOR - (1 << 64),
            parts.shape[1],
            0,
            0,
            BLOCK=_BLOCK,
            COPIES=target is not None,
            SUMS=sums,
        )
    return parts.sum(1) if sums else parts[:, 0]
