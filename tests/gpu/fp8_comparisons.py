"""Compares the FP8 kernels with their twins in torch, and returns the errors.

Kernels run on the device that they get: on a GPU or, on the CPU, in Triton's interpreter. Twins run
on the CPU.
"""

import math
from collections.abc import Sequence

import torch

from kv_kernels.reference import elementwise
from kv_kernels.reference.fp8 import Fp8Linear, Fp8Rows, quantize_rows
from kv_kernels.triton import fp8_layer_ops
from kv_kernels.triton.fp8_linear import (
    BatchInvariantFp8Linear,
    FewRowsPlan,
    TritonFp8Linear,
    multiply_few_rows,
    multiply_many_rows,
)

_HALF_STEP = 2.0**-4  # of the mantissa, relative to the number
_LEAST_HALF_STEP = 2.0**-10  # of the smallest numbers of e4m3


def _randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _to_device(rows: Fp8Rows, device: torch.device) -> Fp8Rows:
    return Fp8Rows(rows.values.to(device), rows.scales.to(device))


def _measure_steps(rows: Fp8Rows, exact: torch.Tensor) -> float:
    """The largest distance from `exact`, in half steps of e4m3: 1 is the best that is possible.

    Infinite if a row does not use the whole range of e4m3.
    """
    values = rows.values.cpu().float()
    used = exact.abs().amax(1) > 0
    if not bool((values.abs().amax(1)[used] == 448.0).all()):
        return math.inf
    scales = rows.scales.cpu()
    bound = torch.maximum(exact.abs() * _HALF_STEP, scales * _LEAST_HALF_STEP)
    return float(((values * scales - exact).abs() / bound).max())


def measure_norm_steps(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device, *, residual: bool
) -> float:
    """The error of `add_rms_norm`, in half steps; infinite if it stores another sum."""
    x, added, weight = (
        _randn(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(((tokens, width), (tokens, width), (width,)))
    )
    x[0] = added[0] = 0.0
    total = x + added if residual else x
    exact = elementwise.RMSNorm(weight, 1e-5)(total)
    stored = added.clone().to(device) if residual else None
    rows = fp8_layer_ops.add_rms_norm(x.to(device), stored, weight.to(device), 1e-5)
    if stored is not None and not torch.equal(stored.cpu(), total):
        return math.inf
    return _measure_steps(rows, exact.float())


def measure_silu_steps(tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """The error of `silu_mul`, in half steps."""
    gate_up = _randn(tokens, 2 * width, dtype=dtype, seed=0) * 3
    exact = elementwise.silu_mul(gate_up.float())
    return _measure_steps(fp8_layer_ops.silu_mul(gate_up.to(device)), exact)


def quantizes_like_reference(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `quantize_rows` returns the reference's bits: rows of all magnitudes, and zeros."""
    x = _randn(tokens, width, dtype=torch.float32, seed=0)
    x *= torch.logspace(-15, 15, tokens)[:, None]
    x[0] = 0.0
    x = x.to(dtype)
    wanted, found = quantize_rows(x), fp8_layer_ops.quantize_rows(x.to(device))
    return torch.equal(
        found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8)
    ) and torch.equal(found.scales.cpu(), wanted.scales)


def measure_product_error(
    rows: int,
    features: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool,
    plan: FewRowsPlan | None = None,
) -> float:
    """The error of a product relative to 1 + the exact magnitude.

    With a plan of the kernel for few rows, and otherwise of torch's kernel.
    """
    x = quantize_rows(_randn(rows, width, dtype=dtype, seed=0))
    weight = quantize_rows(_randn(features, width, dtype=dtype, seed=1) / math.sqrt(width))
    added = _randn(features, dtype=dtype, seed=2) if bias else None
    exact = x.dequantize() @ weight.dequantize().T
    if added is not None:
        exact += added.float()
    there = _to_device(x, device), _to_device(weight, device)
    term = None if added is None else added.to(device)
    if plan is None:
        result = multiply_many_rows(*there, term, dtype)
    else:
        result = multiply_few_rows(*there, term, dtype, plan)
    return float(((result.cpu().float() - exact).abs() / (1.0 + exact.abs())).max())


def measure_linear_error(
    rows: int, dtype: torch.dtype, device: torch.device, *, features: int = 80, width: int = 96
) -> float:
    """The error of `TritonFp8Linear` against its twin, relative to 1 + the exact magnitude."""
    x = _randn(rows, width, dtype=dtype, seed=0)
    weight = _randn(features, width, dtype=dtype, seed=1) / math.sqrt(width)
    bias = _randn(features, dtype=dtype, seed=2)
    residual = _randn(rows, features, dtype=dtype, seed=3)
    exact = Fp8Linear(weight, bias)(x, residual.clone()).float()
    linear = TritonFp8Linear(weight.to(device), bias.to(device))
    result = linear(x.to(device), residual.to(device)).cpu().float()
    return float(((result - exact).abs() / (1.0 + exact.abs())).max())


def find_damaged_rows(rows: int, device: torch.device) -> list[int]:
    """The rows of a product that are not finite; of its input row 1 has a NaN, 3 an infinity."""
    x = _randn(rows, 64, dtype=torch.bfloat16, seed=0)
    x[1, 7], x[3, 50] = torch.nan, -torch.inf
    linear = TritonFp8Linear(_randn(48, 64, dtype=torch.bfloat16, seed=1).to(device))
    found: list[int] = (~linear(x.to(device)).cpu().isfinite().any(1)).nonzero().flatten().tolist()
    return found


def find_counts_that_change_a_row(
    counts: Sequence[int], features: int, width: int, device: torch.device
) -> list[int]:
    """Numbers of rows with which `BatchInvariantFp8Linear` computes other bits for row 0."""
    x = _randn(max(counts), width, dtype=torch.bfloat16, seed=0).to(device)
    weight = _randn(features, width, dtype=torch.bfloat16, seed=1)
    linear = BatchInvariantFp8Linear(weight.to(device))
    alone = linear(x[:1])
    return [count for count in counts if not torch.equal(linear(x[:count])[:1], alone)]


def measure_invariant_error(rows: int, device: torch.device) -> float:
    """The error of `BatchInvariantFp8Linear` against its twin."""
    x, weight = (_randn(*shape, dtype=torch.bfloat16, seed=1) for shape in ((rows, 144), (80, 144)))
    exact = Fp8Linear(weight)(x).float()
    result = BatchInvariantFp8Linear(weight.to(device))(x.to(device)).cpu().float()
    return float(((result - exact).abs() / (1.0 + exact.abs())).max())
