"""Compiles the Triton kernels for a GPU without one, and prints their names as JSON.

The interpreter accepts what the compiler does not. A driver that launches nothing stands in for the
GPU's; the program is one of its own because the driver then holds for the whole process.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kv_kernels.reference.fp8 import Fp8Rows, quantize_rows
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton import fp8_layer_ops, layer_ops
from kv_kernels.triton.batch_invariant_linear import BatchInvariantLinear
from kv_kernels.triton.block_copy import copy_blocks_between, move_blocks
from kv_kernels.triton.fp8_linear import FewRowsPlan, multiply_few_rows
from kv_kernels.triton.prefill_attention import PrefillChunk, attend_chunks, list_query_tiles
from kv_kernels.triton.row_linear import multiply_row
from kv_kernels.triton.sampling import SamplingRows, sample_rows
from kv_kernels.triton.split_decode import SplitDecode

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY_BYTES = 227 << 10  # that a program of a Hopper GPU may use
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16


class LoadedKernels:
    """Stands in for the part of the driver that loads binaries."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        self.names.append(name)
        return 1, 1, 32, 0, 1024  # module, function, registers, spilled ones, most threads

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY_BYTES}


class CompilingDriver:
    """A driver of a Hopper GPU on which launches do nothing."""

    def __init__(self) -> None:
        self.utils = LoadedKernels()

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def launcher_cls(self, *_: Any) -> Callable[..., None]:
        return lambda *_: None


def compile_kernels(dtype: torch.dtype) -> None:
    """Launch every kernel in the shapes of a common model."""
    tokens = 3
    cache = PagedCache.from_arena(torch.zeros(4, 2, 2, KV_HEADS, BLOCK_SIZE, DIM, dtype=dtype))
    x = torch.zeros(tokens, HEADS * DIM, dtype=dtype)
    layer_ops.add_rms_norm(x, None, x[0], 1e-5)
    layer_ops.add_rms_norm(x, x.clone(), x[0], 1e-5)
    multiply_row(x[:1], torch.zeros(512, HEADS * DIM, dtype=dtype), None)
    for features in (512, 9000):
        BatchInvariantLinear(torch.zeros(features, HEADS * DIM, dtype=dtype), None)(x)
        BatchInvariantLinear(torch.zeros(features, 37, dtype=dtype), x[0])(x[:, :37])
    layer_ops.silu_mul(torch.zeros(tokens, 2 * 14336, dtype=dtype))
    qkv = torch.zeros(tokens, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
    places = torch.zeros(tokens, dtype=torch.int32)
    query = torch.zeros(tokens, HEADS, DIM, dtype=dtype)
    for norm in (None, torch.ones(HEADS + KV_HEADS, DIM, dtype=dtype)):
        angles = x[:, :DIM], x[:, :DIM]
        layer_ops.rotate_and_write_kv(qkv, *angles, norm, 1e-5, cache, 1, places, query)
    for splits in (1, 8):
        decode = SplitDecode.allocate(places, places, places, HEADS, DIM, splits)
        decode.attend(query, cache, 1, None, torch.empty(tokens, HEADS, DIM, dtype=dtype))
    tiles = torch.from_numpy(list_query_tiles([PrefillChunk(0, tokens, 0, 0)]))
    for window in (None, 33):
        attend_chunks(query, cache, 1, places, tiles, window, torch.empty_like(x).view(query.shape))
    numbers = torch.zeros(tokens)
    rows = SamplingRows(numbers, numbers, places, numbers, places.long(), places, places)
    sample_rows(torch.zeros(tokens, 128_256, dtype=dtype), rows)
    for layer in (None, 1):
        copy_blocks_between(cache.arena, cache.arena.clone(), places, layer)
        move_blocks(cache.arena, cache.arena.clone(), places, places, layer)


def compile_fp8_kernels() -> None:
    """Launch every FP8 kernel in the shapes of a common model."""
    hidden = torch.zeros(3, HEADS * DIM, dtype=torch.bfloat16)
    fp8_layer_ops.add_rms_norm(hidden, None, hidden[0], 1e-5)
    fp8_layer_ops.add_rms_norm(hidden, hidden.clone(), hidden[0], 1e-5)
    fp8_layer_ops.silu_mul(torch.zeros(3, 2 * 14336, dtype=torch.bfloat16))
    fp8_layer_ops.quantize_rows(hidden)
    weight = quantize_rows(torch.zeros(512, HEADS * DIM))
    bias = torch.zeros(512, dtype=torch.bfloat16)
    plans = [FewRowsPlan.choose(features, 4096) for features in (4096, 28672)]
    for added in (None, bias):
        x, scales = weight.values[:1], (weight.scales[:1], weight.scales)
        multiply_row(x, weight.values, added, scales=scales, dtype=torch.bfloat16)
    for rows in (2, 17, 64):
        few = Fp8Rows(weight.values[:rows], weight.scales[:rows])
        for plan in (*plans, FewRowsPlan(128, splits=4), FewRowsPlan(128, rows=64)):
            multiply_few_rows(few, weight, None, torch.bfloat16, plan)
        multiply_few_rows(few, weight, bias, torch.bfloat16, plans[0])


def main() -> None:
    driver = CompilingDriver()
    triton.runtime.driver.set_active(driver)
    compile_kernels(torch.bfloat16)
    compile_fp8_kernels()
    json.dump(sorted(set(driver.utils.names)), sys.stdout)


if __name__ == "__main__":
    main()
