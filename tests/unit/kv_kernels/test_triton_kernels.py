"""The Triton kernels, run by Triton's interpreter and compiled for a GPU, each in a process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.torch_kernels import TorchKernels
from tests.gpu.kernel_comparisons import SAMPLING_FILTERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# bf16: operands and the result are rounded to 8 bits each.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}

Measured = dict[str, float]


def run_program(name: str) -> Any:
    """Run a program of this folder, which prints JSON."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    command = [
        sys.executable,
        *("-W", "error"),
        # The interpreter also computes the lanes that a kernel masks, with NumPy.
        *("-W", "ignore::RuntimeWarning"),
        str(Path(__file__).with_name(name)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def measured() -> Measured:
    results: Measured = run_program("triton_interpreter.py")
    return results


def test_every_kernel_compiles_for_a_gpu() -> None:
    written = {
        match
        for module in (ROOT / "kernels/kv_kernels/triton").glob("*.py")
        for match in re.findall(r"^def (_\w+_kernel)\(", module.read_text(), re.MULTILINE)
    }
    assert set(run_program("triton_compilation.py")) == written


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", ["with residual", "alone"])
def test_rms_norm_equals_the_reference(measured: Measured, case: str, kind: str) -> None:
    assert measured[f"norm {case} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
def test_silu_mul_equals_the_reference(measured: Measured, kind: str) -> None:
    assert measured[f"silu {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("shape", ["6 x 4096", "5 x 100", "11 x 8200"])
def test_product_of_one_row_equals_the_reference(measured: Measured, shape: str, kind: str) -> None:
    assert measured[f"row product {shape} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", ["grouped", "odd sizes", "QK norm"])
def test_rotated_queries_and_written_kv_equal_the_reference(
    measured: Measured, case: str, kind: str
) -> None:
    assert measured[f"rotation {case} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize(
    "case",
    [
        "grouped",
        "several splits",
        "more splits than tokens",
        "odd sizes",
        "windowed",
        "windowed over splits",
    ],
)
def test_paged_decode_equals_the_reference(measured: Measured, case: str, kind: str) -> None:
    assert measured[f"decode {case} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", ["several chunks", "odd sizes", "windowed", "long window"])
def test_chunked_prefill_equals_the_reference(measured: Measured, case: str, kind: str) -> None:
    assert measured[f"prefill {case} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("layer", [None, 2])
def test_block_copies_change_nothing_else(measured: Measured, layer: int | None, kind: str) -> None:
    assert measured[f"copy of layer {layer} {kind}"] is True


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("layer", [None, 2])
def test_moved_blocks_have_the_checksums_of_the_reference(
    measured: dict[str, list[bool]], layer: int | None, kind: str
) -> None:
    assert measured[f"moves of layer {layer} {kind}"] == [True, True]


@pytest.mark.parametrize("copies", [False, True])
def test_moved_layers_have_the_checksums_of_the_reference(
    measured: dict[str, list[bool]], copies: bool
) -> None:
    assert measured[f"slab moves, copies {copies}"] == [True, True]


@pytest.mark.parametrize("parts", ["", " of several parts", " of 1", " of 5"])
@pytest.mark.parametrize("case", SAMPLING_FILTERS)
def test_draws_equal_those_of_the_reference(measured: Measured, case: str, parts: str) -> None:
    assert measured[f"draws {case}{parts}"] == 0


def test_top_k_beyond_the_groups_that_bound_it(measured: Measured) -> None:
    assert measured["draws more than groups"] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_are_reported(
    measured: dict[str, list[int]], temperature: float
) -> None:
    intact, *damaged = measured[f"damaged {temperature}"]
    assert intact >= 0
    assert damaged == [-1, -1, -1]


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("case", ["norm with residual", "norm alone", "silu"])
def test_quantized_rows_are_rounded_to_the_nearest(
    measured: Measured, case: str, kind: str
) -> None:
    assert measured[f"fp8 {case} {kind}"] < 1.001


@pytest.mark.parametrize("kind", TOLERANCE)
def test_quantized_rows_equal_the_reference(measured: Measured, kind: str) -> None:
    assert measured[f"fp8 rows {kind}"] is True


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5, 17, 33])
@pytest.mark.parametrize(
    "case",
    [
        "whole",
        "with bias",
        "in wide tiles",
        "in wide tiles with bias",
        "split",
        "split with bias",
        "with idle splits",
        "of torch",
        "of torch with bias",
    ],
)
def test_fp8_products_equal_the_reference(
    measured: Measured, case: str, rows: int, kind: str
) -> None:
    assert measured[f"fp8 product {case} {rows} {kind}"] < TOLERANCE[kind]


@pytest.mark.parametrize("rows", [1, 5, 17, 33, 70])
def test_fp8_layers_equal_the_reference(measured: Measured, rows: int) -> None:
    assert measured[f"fp8 linear {rows} float32"] < 1e-5
    # Products of many rows are rounded before the bias is added, and after.
    assert measured[f"fp8 linear {rows} bfloat16"] < 2 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize("rows", [5, 80])
def test_batch_invariant_fp8_layers_equal_the_reference(measured: Measured, rows: int) -> None:
    assert measured[f"fp8 invariant {rows}"] < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("rows", [5, 80])
def test_damaged_rows_reach_the_result_of_an_fp8_layer(
    measured: dict[str, list[int]], rows: int
) -> None:
    assert measured[f"fp8 damaged {rows}"] == [1, 3]


def test_the_cpu_gets_the_reference() -> None:
    assert type(kernels_for(torch.device("cpu"))) is TorchKernels
