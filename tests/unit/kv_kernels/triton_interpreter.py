"""Runs the Triton kernels in Triton's interpreter and prints their largest errors as JSON.

It is a program of its own, because TRITON_INTERPRET must be set before a kernel is defined and then
holds for the whole process.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from kv_kernels.reference import paged_attention
from kv_kernels.reference.paged_attention import AttentionContext, PagedCache, SlotMapping
from kv_kernels.triton import decode_attention, kv_write

KINDS = ("float32", "float16", "bfloat16")
# kv_heads, heads per kv_head, dim, block_size, context lengths, window
Shape = tuple[int, int, int, int, tuple[int, ...], int | None]
SHAPES: dict[str, Shape] = {
    "grouped": (2, 3, 16, 4, (5, 8, 1), None),
    "several splits": (1, 2, 16, 1, (decode_attention.PAGES_PER_SPLIT + 3, 2), None),
    "odd sizes": (1, 1, 24, 6, (11,), None),
    "windowed": (2, 2, 16, 4, (21, 11, 10, 8, 7, 3), 7),
    "windowed over splits": (
        1,
        1,
        16,
        2,
        (50, 3),
        2 * decode_attention.PAGES_PER_SPLIT + 3,
    ),
}


def max_decode_error(
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    lengths: tuple[int, ...],
    window: int | None,
    kind: str,
) -> float:
    """Largest difference between the Triton kernel and the torch reference in fp32."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, kind)
    widths = [-(-length // block_size) for length in lengths]
    arena = torch.randn(sum(widths) + 1, 2, 2, kv_heads, block_size, dim, generator=generator).to(
        dtype
    )
    order = torch.randperm(sum(widths), generator=generator).numpy()
    blocks = np.split(order, np.cumsum(widths)[:-1])
    wholes = [AttentionContext(b, length) for b, length in zip(blocks, lengths, strict=True)]
    contexts = [paged_attention.clip_to_window(whole, window, 1, block_size) for whole in wholes]
    query = torch.randn(len(lengths), kv_heads * group + 1, dim, generator=generator).to(dtype)[
        :, :-1
    ]
    exact = torch.zeros(query.shape)
    longest_first = sorted(range(len(contexts)), key=lambda i: -contexts[i].length)
    reference = paged_attention.plan_decode(
        PagedCache.from_arena(arena.float()), [contexts[i] for i in longest_first], torch.float32
    )
    for part in reference:
        part(query[longest_first].float(), 1, exact)
    # Slots that no query sees may hold anything.
    for whole, context in zip(wholes, contexts, strict=True):
        arena[context.block_table[-1], :, :, :, (context.length - 1) % block_size + 1 :] = torch.nan
        arena[context.block_table[0], :, :, :, : context.hidden_tokens] = torch.nan
        arena[whole.block_table[: -len(context.block_table)]] = torch.nan
    out = torch.full(query.shape, torch.nan, dtype=dtype)
    for part in decode_attention.plan_decode(
        PagedCache.from_arena(arena), contexts, dtype, upcast=True
    ):
        part(query, 1, out)
    return float((out[longest_first].float() - exact).abs().max())


def max_write_error(kind: str) -> float:
    """Largest difference between the arenas that the Triton write and the reference leave."""
    dtype = getattr(torch, kind)
    generator = torch.Generator().manual_seed(1)
    arena = torch.randn(4, 2, 2, 2, 4, 12, generator=generator).to(dtype)
    expected = arena.clone()
    kv = torch.randn(3, 5, 12, generator=generator).to(dtype)[:, 1:]
    slots = SlotMapping(torch.tensor([2, 0, 3]), torch.tensor([3, 0, 1]))
    kv_write.write_kv(kv, PagedCache.from_arena(arena), 1, slots)
    paged_attention.write_kv(kv, PagedCache.from_arena(expected), 1, slots)
    return float((arena.float() - expected.float()).abs().max())


def main() -> None:
    errors = {
        f"decode {name} {kind}": max_decode_error(*shape, kind)
        for name, shape in SHAPES.items()
        for kind in KINDS
    }
    errors |= {f"write {kind}": max_write_error(kind) for kind in KINDS}
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
