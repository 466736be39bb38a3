"""Compares the Triton kernels that copy blocks with what they should leave behind."""

import numpy as np
import torch

from kv_kernels.reference.block_checksums import compute_checksums
from kv_kernels.triton.block_copy import (
    ChecksumParts,
    SlabPlaces,
    compute_block_checksums,
    copy_blocks_between,
    count_checksum_parts,
    launch_slab_move,
    move_blocks,
)
from kv_transfer.device.cuda_views import view_pinned_words
from tests.gpu.kernel_comparisons import randn


def check_block_copies(source: torch.Tensor, target: torch.Tensor, layer: int | None) -> bool:
    """Whether `copy_blocks_between` copies a few blocks of these arenas, and nothing else."""
    blocks = torch.tensor([4, 0, 3])
    source.copy_(randn(*source.shape, dtype=torch.float32, seed=0))
    target.copy_(randn(*target.shape, dtype=torch.float32, seed=1))
    wanted, copied = target.cpu(), source.cpu()
    wanted = wanted.clone()
    part = slice(None) if layer is None else layer
    wanted[blocks, part] = copied[blocks, part]
    copy_blocks_between(source, target, blocks.to(source.device, torch.int32), layer)
    if source.is_cuda:
        torch.cuda.synchronize()
    return torch.equal(target.cpu(), wanted)


def check_moved_blocks(
    source: torch.Tensor, target: torch.Tensor, layer: int | None
) -> tuple[bool, bool]:
    """Whether `move_blocks` moves a few blocks of these arenas and nothing else, and whether its
    checksums, and those computed where the blocks were written, are right."""
    places = torch.tensor([4, 0, 3]), torch.tensor([1, 5, 2])
    source.copy_(randn(*source.shape, dtype=torch.float32, seed=0))
    target.copy_(randn(*target.shape, dtype=torch.float32, seed=1))
    wanted, copied = target.cpu().clone(), source.cpu()
    part = slice(None) if layer is None else layer
    wanted[places[1], part] = copied[places[0], part]
    moved, written = (place.to(source.device, torch.int32) for place in places)
    sums = move_blocks(source, target, moved, written, layer)
    sums_there = compute_block_checksums(target, written, layer)
    if source.is_cuda:
        torch.cuda.synchronize()
    words = copied[places[0], part].reshape(3, -1).view(torch.int64).numpy().view(np.uint64)
    exact = compute_checksums(words).view(np.int64).tolist()
    return torch.equal(target.cpu(), wanted), sums.tolist() == sums_there.tolist() == exact


def check_slab_moves(
    device: torch.device, slab_words: int, layers: int, *, copies: bool
) -> tuple[bool, bool]:
    """Whether `launch_slab_move` copies any layers of a few blocks to other places, and nothing
    else, and whether the parts of the checksums add up to those of the reference, also if one
    launch copies the first layer and another the rest."""
    rng = np.random.default_rng(3)
    arena = rng.integers(0, 1 << 62, (7, layers, slab_words), dtype=np.int64)
    source = torch.from_numpy(arena).to(device)
    read, written = [5, 0, 3, 6], [8, 2, 1, 0]
    read_numbers, written_numbers = [
        _numbers_for(device, torch.tensor(blocks, dtype=torch.int32)) for blocks in (read, written)
    ]
    is_right = has_right_sums = True
    for first in range(layers):
        for count, split in [(n, s) for n in range(1, layers - first + 1) for s in (0, 1) if s < n]:
            target = torch.zeros(9, layers, slab_words, dtype=torch.int64, device=device)
            words, start = count * slab_words, first * slab_words
            launches = [split * slab_words, words - split * slab_words]
            num_parts = sum(map(count_checksum_parts, launches))
            parts = _numbers_for(device, torch.zeros(4 * num_parts).long())
            own = SlabPlaces(source.view(-1), layers * slab_words, start)
            other = SlabPlaces(target.view(-1), layers * slab_words, start)
            checksums = ChecksumParts(parts.view(4, -1))
            for launched in filter(None, launches):
                places = other if copies else None
                launch_slab_move(own, places, read_numbers, written_numbers, launched, checksums)
                own, other = own.skip(launched), other.skip(launched)
                checksums = checksums.skip(launched)
            if device.type == "cuda":
                torch.cuda.synchronize()
            moved = np.ascontiguousarray(arena[read, first : first + count]).reshape(4, -1)
            wanted = np.zeros((9, layers, slab_words), np.int64)
            if copies:
                wanted[written, first : first + count] = arena[read, first : first + count]
            is_right &= np.array_equal(target.cpu().numpy(), wanted)
            sums = parts.cpu().view(4, -1).sum(1).numpy().view(np.uint64)
            has_right_sums &= np.array_equal(sums, compute_checksums(moved.view(np.uint64)))
    return is_right, has_right_sums


def _numbers_for(device: torch.device, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers in memory that the kernel reads and the host too, as in a hand-off."""
    return view_pinned_words(numbers, numbers.dtype) if device.type == "cuda" else numbers
