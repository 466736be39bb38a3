"""Compares the Triton kernels that copy blocks with what they should leave behind."""

import numpy as np
import torch

from kv_kernels.reference.block_checksums import compute_checksums
from kv_kernels.triton.block_copy import (
    compute_block_checksums,
    copy_blocks_between,
    move_blocks,
)
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
