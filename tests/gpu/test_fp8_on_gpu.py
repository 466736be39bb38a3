"""FP8 layers on an NVIDIA GPU, against their twins on CPUs; skipped without a GPU that has FP8."""

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.cli.common.default_model import find_default_model
from baton.models.model_identity import FP8, FP8_MIN_CAPABILITY, UNQUANTIZED, Quantization
from benchmarks.text.text_scores import (
    WINDOW_TOKENS,
    measure_perplexity,
    read_held_out_documents,
    score_tokens,
    split_windows,
)
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model

pytest.importorskip("triton")

from kv_kernels.triton.fp8_linear import FewRowsPlan, TritonFp8Linear
from tests.gpu import engine_comparisons
from tests.gpu import fp8_comparisons as compare


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_MIN_CAPABILITY


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_fp8(), reason="torch sees no NVIDIA GPU with FP8 here"),
]
CUDA = torch.device("cuda")
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2}
FAST_SUM_TOLERANCE = 5e-2  # tensor cores sum up products of FP8 with about 14 bits
# Width, plan and bias, of the kernel for few rows.
PRODUCTS: dict[str, tuple[int, FewRowsPlan, bool]] = {
    "whole": (4096, FewRowsPlan(128), True),
    "in wide tiles": (4096, FewRowsPlan(256, stages=6), False),
    "in wide tiles of a long row": (14336, FewRowsPlan(256, stages=6), True),
    "split": (4096, FewRowsPlan(128, splits=4), False),
    "long split": (14336, FewRowsPlan(128, splits=2), False),
    "odd sizes": (2064, FewRowsPlan(128, splits=3), True),
    "odd sizes in wide tiles": (2064, FewRowsPlan(256), True),
    "with idle splits": (80, FewRowsPlan(128, splits=4), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (300, 4096), (7, 896), (33, 14336)])
def test_quantized_rows_are_rounded_to_the_nearest(
    tokens: int, width: int, dtype: torch.dtype
) -> None:
    """The rounding to bf16 that comes before adds a thirtieth of a half step."""
    for residual in (False, True):
        assert compare.measure_norm_steps(tokens, width, dtype, CUDA, residual=residual) < 1.1
    assert compare.measure_silu_steps(tokens, width, dtype, CUDA) < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(31, 75), (200, 4096)])
def test_quantized_rows_equal_the_reference(tokens: int, width: int, dtype: torch.dtype) -> None:
    assert compare.quantizes_like_reference(tokens, width, dtype, CUDA)


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 5, 17, 33, 64])
@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_few_rows_equal_the_reference(case: str, rows: int, kind: str) -> None:
    width, plan, bias = PRODUCTS[case]
    error = compare.measure_product_error(
        rows, 1040, width, getattr(torch, kind), CUDA, bias=bias, plan=plan
    )
    assert error < TOLERANCE[kind]


@pytest.mark.parametrize("rows", [1, 33, 100, 2048])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [4096, 14336, 80])
def test_products_of_torch_equal_the_reference(width: int, bias: bool, rows: int) -> None:
    error = compare.measure_product_error(rows, 1040, width, torch.bfloat16, CUDA, bias=bias)
    assert error < FAST_SUM_TOLERANCE


@pytest.mark.parametrize("rows", [1, 5, 17, 33, 70])
@pytest.mark.parametrize(("features", "width"), [(80, 96), (4096, 1040), (1040, 14336)])
def test_layers_equal_the_reference(features: int, width: int, rows: int) -> None:
    error = compare.measure_linear_error(rows, torch.bfloat16, CUDA, features=features, width=width)
    assert error < FAST_SUM_TOLERANCE


def test_batch_invariant_layers_depend_on_no_other_row() -> None:
    for rows in (1, 63, 300):
        assert compare.measure_invariant_error(rows, CUDA) < TOLERANCE["bfloat16"]
    counts = (1, 2, 16, 33, 64, 65, 300, 2048)
    assert compare.find_counts_that_change_a_row(counts, 4096, 4096, CUDA) == []


@pytest.mark.parametrize("rows", [5, 80])
def test_damaged_rows_reach_the_result(rows: int) -> None:
    assert compare.find_damaged_rows(rows, CUDA) == [1, 3]


def test_captured_products_repeat_bit_by_bit() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    weight = torch.randn(4096, 4096, device=CUDA, generator=generator).bfloat16()
    linear = TritonFp8Linear(weight)
    for rows in (1, 16, 64, 128):
        x = torch.randn(rows, 4096, device=CUDA, generator=generator).bfloat16()
        wanted = linear(x).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = linear(x)
        for _ in range(3):
            result.zero_()
            graph.replay()
            assert torch.equal(result, wanted)


def load_engine(folder: Path, quantize: Quantization, device: str = "cuda") -> BaseEngine:
    engine = load_model_engine(
        folder,
        dtype="bfloat16",
        device=device,  # type: ignore[arg-type]
        quantize=quantize,
        max_model_len=256,
        uses_graphs=False,
        emulates_fp8=True,
    )
    engine_comparisons.bind_engine(engine)
    return engine


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixed"])
def test_logprobs_equal_those_of_the_twin(family: str, tmp_path: Path) -> None:
    """The rounding of bf16 changes some values to their neighbours in FP8, in both engines."""
    folder = build_model(family, tmp_path, dtype="bfloat16")  # type: ignore[arg-type]
    prompt = [place * place * 7 % 512 for place in range(200)]
    quantized, twin, unquantized = (
        np.array(score_tokens(load_engine(folder, quantize, device), prompt))
        for quantize, device in ((FP8, "cuda"), (FP8, "cpu"), (UNQUANTIZED, "cuda"))
    )
    assert np.abs(quantized - twin).mean() < 0.75 * np.abs(quantized - unquantized).mean()


def test_perplexity_of_held_out_text_is_near_that_of_bf16() -> None:
    model = find_default_model()
    windows = list(split_windows(read_held_out_documents(model), 16384))
    found = [
        measure_perplexity(
            load_model_engine(
                model,
                dtype="bfloat16",
                device="cuda",
                quantize=quantize,
                max_model_len=WINDOW_TOKENS,
                uses_graphs=False,
            ),
            windows,
        )
        for quantize in (UNQUANTIZED, FP8)
    ]
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_weights_take_half_the_memory() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    weight = torch.zeros(8192, 4096, dtype=torch.bfloat16, device=CUDA)
    linear = TritonFp8Linear(weight)
    del weight
    taken = torch.cuda.memory_allocated() - before
    assert 8192 * 4096 <= taken < 8192 * 4096 * 1.01
    assert linear(torch.zeros(1, 4096, dtype=torch.bfloat16, device=CUDA)).shape == (1, 8192)
