"""Runs the Triton kernels in Triton's interpreter and prints their errors as JSON.

It is a program of its own, because TRITON_INTERPRET must be set before a kernel is defined and then
holds for the whole process.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from baton.types import SamplingParams
from kv_kernels.triton.fp8_linear import FewRowsPlan
from tests.gpu import block_comparisons
from tests.gpu import fp8_comparisons as compare_fp8
from tests.gpu import kernel_comparisons as compare
from tests.gpu.interpreter_setup import prepare_interpreter
from tests.gpu.kernel_comparisons import SAMPLING_FILTERS, AttentionShape

CPU = torch.device("cpu")
KINDS = ("float32", "bfloat16")
DECODE_CASES: dict[str, tuple[AttentionShape, tuple[int, ...], int]] = {
    "grouped": (AttentionShape(2, 3, 16, 4), (5, 8, 1, 0, 70), 1),
    "several splits": (AttentionShape(1, 2, 16, 16), (0, 200, 2, 130), 3),
    "more splits than tokens": (AttentionShape(1, 1, 16, 1), (3, 66), 8),
    "odd sizes": (AttentionShape(1, 1, 24, 6), (11, 70), 2),
    "windowed": (AttentionShape(2, 2, 16, 4, window=7), (21, 11, 10, 8, 7, 3), 1),
    "windowed over splits": (AttentionShape(1, 1, 16, 2, window=70), (210, 100, 0, 3), 3),
}
PREFILL_CASES: dict[str, tuple[AttentionShape, tuple[tuple[int, int], ...]]] = {
    "several chunks": (AttentionShape(2, 2, 16, 4), ((0, 5), (9, 130), (300, 1))),
    "odd sizes": (AttentionShape(1, 3, 24, 6), ((0, 70), (77, 200))),
    "windowed": (AttentionShape(2, 1, 32, 16, window=33), ((0, 150), (300, 140), (500, 3))),
    "long window": (AttentionShape(1, 1, 16, 16, window=150), ((100, 260),)),
}
ROW_PRODUCTS = ((6, 4096, False), (5, 100, True), (11, 8200, True))
ROTATIONS = {
    "grouped": (AttentionShape(2, 2, 16, 4), False),
    "odd sizes": (AttentionShape(1, 3, 24, 6), False),
    "QK norm": (AttentionShape(2, 3, 12, 4), True),
}
# Width, plan and bias; a width that tiles do not divide, and splits that get nothing to read.
FP8_PRODUCTS: dict[str, tuple[int, FewRowsPlan | None, bool]] = {
    "whole": (256, FewRowsPlan(128), False),
    "with bias": (144, FewRowsPlan(128), True),
    "in wide tiles": (512, FewRowsPlan(256), False),
    "in wide tiles with bias": (144, FewRowsPlan(256), True),
    "split": (256, FewRowsPlan(128, splits=2), False),
    "split with bias": (528, FewRowsPlan(128, splits=3), True),
    "with idle splits": (80, FewRowsPlan(128, splits=4), False),
    "of torch": (144, None, False),
    "of torch with bias": (144, None, True),
}
FP8_ROWS = (1, 5, 17, 33)
FP8_LAYER_ROWS = (1, 5, 17, 33, 70)  # the last one is multiplied by torch


def measure_errors(kind: str) -> dict[str, float]:
    """Errors of all kernels in one dtype."""
    dtype = getattr(torch, kind)
    errors = {
        f"norm with residual {kind}": compare.measure_norm_error(5, 48, dtype, CPU, residual=True),
        f"norm alone {kind}": compare.measure_norm_error(2, 37, dtype, CPU, residual=False),
        f"silu {kind}": compare.measure_silu_error(3, 1100, dtype, CPU),
    }
    for features, width, bias in ROW_PRODUCTS:
        errors[f"row product {features} x {width} {kind}"] = compare.measure_row_product_error(
            features, width, dtype, CPU, bias=bias
        )
    for name, (shape, qk_norm) in ROTATIONS.items():
        errors[f"rotation {name} {kind}"] = compare.measure_rotation_error(
            shape, 9, dtype, CPU, qk_norm=qk_norm
        )
    for name, (shape, lengths, splits) in DECODE_CASES.items():
        errors[f"decode {name} {kind}"] = compare.measure_decode_error(
            shape, lengths, splits, dtype, CPU
        )
    for name, (shape, chunks) in PREFILL_CASES.items():
        errors[f"prefill {name} {kind}"] = compare.measure_prefill_error(shape, chunks, dtype, CPU)
    return errors


def measure_fp8_errors(kind: str) -> dict[str, object]:
    """Errors of the FP8 kernels with activations in one dtype."""
    dtype = getattr(torch, kind)
    results: dict[str, object] = {
        f"fp8 norm with residual {kind}": compare_fp8.measure_norm_steps(
            5, 48, dtype, CPU, residual=True
        ),
        f"fp8 norm alone {kind}": compare_fp8.measure_norm_steps(2, 37, dtype, CPU, residual=False),
        f"fp8 silu {kind}": compare_fp8.measure_silu_steps(3, 1100, dtype, CPU),
        f"fp8 rows {kind}": compare_fp8.quantizes_like_reference(31, 75, dtype, CPU),
    }
    for rows in FP8_ROWS:
        for case, (width, plan, bias) in FP8_PRODUCTS.items():
            results[f"fp8 product {case} {rows} {kind}"] = compare_fp8.measure_product_error(
                rows, 80, width, dtype, CPU, bias=bias, plan=plan
            )
    for rows in FP8_LAYER_ROWS:
        results[f"fp8 linear {rows} {kind}"] = compare_fp8.measure_linear_error(rows, dtype, CPU)
    return results


def main() -> None:
    prepare_interpreter()
    results: dict[str, object] = {}
    for kind in KINDS:
        results |= measure_errors(kind)
        results |= measure_fp8_errors(kind)
        source = torch.empty(6, 3, 2, 2, 4, 10, dtype=getattr(torch, kind))
        for layer in (None, 2):
            results[f"copy of layer {layer} {kind}"] = block_comparisons.check_block_copies(
                source, torch.empty_like(source), layer
            )
            results[f"moves of layer {layer} {kind}"] = block_comparisons.check_moved_blocks(
                source, torch.empty_like(source), layer
            )
    for copies in (False, True):
        results[f"slab moves, copies {copies}"] = block_comparisons.check_slab_moves(
            CPU, 70, 3, copies=copies
        )
    for name, params in SAMPLING_FILTERS.items():
        results[f"draws {name}"] = compare.count_different_draws(params, 900, 6, torch.float32, CPU)
        # Several programs draw for a row.
        results[f"draws {name} of several parts"] = compare.count_different_draws(
            params, 9700, 3, torch.bfloat16, CPU
        )
        for num_allowed in (1, 5):
            results[f"draws {name} of {num_allowed}"] = compare.count_different_draws(
                params, 9700, 2, torch.bfloat16, CPU, num_allowed=num_allowed
            )
    results["draws more than groups"] = compare.count_different_draws(
        SamplingParams(1, temperature=1.0, top_k=1000), 4096, 8, torch.bfloat16, CPU
    )
    for temperature in (0.0, 1.0):
        results[f"damaged {temperature}"] = compare.sample_damaged_rows(CPU, temperature)
    for rows in (5, 80):
        results[f"fp8 invariant {rows}"] = compare_fp8.measure_invariant_error(rows, CPU)
        results[f"fp8 damaged {rows}"] = compare_fp8.find_damaged_rows(rows, CPU)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
