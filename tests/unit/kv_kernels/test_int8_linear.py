"""Linear layers in int8 in torch, against exact integers and products in fp32."""

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_kernels.reference import int8_linear
from kv_kernels.reference.int8_linear import (
    Int8Linear,
    multiply_exactly,
    multiply_in_fp32,
    quantize_rows,
    quantize_weight,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_int8(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


def multiply_in_int64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.long() @ weight.long().T).to(torch.int32)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-11, 1.0, 1e30])
def test_largest_magnitude_of_a_row_becomes_127(magnitude: float) -> None:
    x = draw(5, 48).clamp(-0.9, 0.9)
    x[:, 7] = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    rows = quantize_rows(x * magnitude)
    if magnitude < int8_linear.MIN_PEAK:
        assert not rows.values.any()
    else:
        assert rows.values[:, 7].tolist() == [127, -127, 127, -127, 127]
        assert torch.allclose(rows.scales, torch.tensor(magnitude / 127))


def test_halves_are_rounded_to_even() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, -0.51]])
    rows = quantize_rows(row)
    assert rows.values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0, -1]]
    assert float(rows.scales) == 1.0


def test_rounding_error_is_half_a_step() -> None:
    x = draw(20, 300)
    rows = quantize_rows(x)
    assert bool(((rows.dequantize() - x).abs() <= 0.5 * rows.scales * (1 + 1e-4)).all())


def test_row_of_zeros_stays_zero() -> None:
    x = draw(3, 16)
    x[1] = 0.0
    rows = quantize_rows(x)
    assert not rows.values[1].any()
    assert 0.0 < float(rows.scales[1]) < 1e-13
    assert not Int8Linear(draw(32, 16))(x)[1].any()


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_damaged_row_reaches_the_result(damage: float) -> None:
    x = draw(3, 16)
    x[1, 4] = damage
    assert not quantize_rows(x).values[1].any()
    finite = Int8Linear(draw(32, 16))(x).isfinite()
    assert finite.any(1).tolist() == [True, False, True]


def test_damaged_weight_reaches_the_result() -> None:
    weight = draw(32, 16)
    weight[5, 3] = math.nan
    finite = Int8Linear(weight)(draw(2, 16, seed=1)).isfinite()
    assert finite.all(0).tolist() == [feature != 5 for feature in range(32)]


def test_weights_are_quantized_by_feature_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(50, 16)
    whole = quantize_rows(weight)
    monkeypatch.setattr(int8_linear, "_ROWS_AT_ONCE", 7)
    parts = quantize_weight(weight)
    assert torch.equal(parts.values, whole.values)
    assert torch.equal(parts.scales, whole.scales)


@given(st.integers(1, 40), st.integers(1, 2500), st.integers(1, 40), st.integers(0, 9))
def test_products_are_exact(rows: int, width: int, features: int, seed: int) -> None:
    x, weight = draw_int8(rows, width, seed=seed), draw_int8(features, width, seed=seed + 1)
    expected = multiply_in_int64(x, weight)
    assert torch.equal(multiply_exactly(x, weight), expected)
    assert torch.equal(multiply_in_fp32(x, weight), expected)


@pytest.mark.parametrize("width", [1040, 1041, 5000, int8_linear.MAX_WIDTH])
def test_the_largest_sums_are_exact(width: int) -> None:
    x = torch.full((2, width), 127, dtype=torch.int8)
    x[1] = -127
    weight = torch.full((3, width), 127, dtype=torch.int8)
    weight[1, -1] = 126
    expected = multiply_in_int64(x, weight)
    assert torch.equal(multiply_exactly(x, weight), expected)
    assert torch.equal(multiply_in_fp32(x, weight), expected)


def test_products_that_saturate_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of oneDNN do on a processor without VNNI: pairs of products are added in 16 bits."""

    def saturate(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        products = x.int()[:, None] * columns.T.int()
        odd = products.shape[2] % 2
        pairs = torch.nn.functional.pad(products, (0, odd)).unflatten(2, (-1, 2)).sum(3)
        sums: torch.Tensor = pairs.clamp(-(2**15), 2**15 - 1).sum(2)
        return sums.int()

    x, weight = torch.full((1, 8), 127, dtype=torch.int8), torch.full((2, 8), 127, dtype=torch.int8)
    monkeypatch.setattr(torch, "_int_mm", saturate)
    int8_linear._has_exact_int8_products.cache_clear()
    try:
        assert multiply_exactly(x, weight).tolist() == [[8 * 127**2] * 2]
    finally:
        int8_linear._has_exact_int8_products.cache_clear()


def test_products_that_are_slow_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without VNNI torch may multiply int8 much more slowly than fp32."""

    def multiply_slowly(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)  # the product in fp32 takes less than a millisecond
        return multiply_in_fp32(x, columns.T)

    monkeypatch.setattr(torch, "_int_mm", multiply_slowly)
    monkeypatch.setattr(int8_linear, "_has_exact_int8_products", lambda: True)
    int8_linear._has_fast_int8_products.cache_clear()
    try:
        assert not int8_linear._has_fast_int8_products()
        monkeypatch.setattr(torch, "_int_mm", None)
        x = torch.full((2, 8), 127, dtype=torch.int8)
        assert multiply_exactly(x, x).tolist() == [[8 * 127**2] * 2] * 2
    finally:
        int8_linear._has_fast_int8_products.cache_clear()


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_near_that_of_unquantized_values(rows: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, 512).to(dtype), draw(64, 512, seed=1).to(dtype)
    bias, residual = draw(64, seed=2).to(dtype), draw(rows, 64, seed=3).to(dtype)
    given_residual = residual.clone()
    y = Int8Linear(weight, bias)(x, given_residual)
    exact = x.float() @ weight.float().T + bias.float() + residual.float()
    assert y.dtype is dtype
    assert torch.equal(given_residual, residual)
    # A value is off by 1/440 of its row's peak (root mean square), which is about 3 deviations.
    assert float((y.float() - exact).square().mean().sqrt()) < 0.015 * math.sqrt(512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = draw(3, 100).to(dtype), draw(7, 100, seed=1).to(dtype)
    bias, residual = draw(7, seed=2).to(dtype), draw(3, 7, seed=3).to(dtype)
    rows, columns = quantize_rows(x), quantize_weight(weight)
    wide = multiply_in_int64(rows.values, columns.values).float() * rows.scales * columns.scales.T
    expected = (wide + bias.float() + residual.float()).to(dtype)
    assert torch.equal(Int8Linear(weight, bias)(x, residual), expected)


def test_rows_do_not_depend_on_others() -> None:
    linear, x = Int8Linear(draw(40, 96)), draw(9, 96, seed=1)
    assert torch.equal(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_a_weight_whose_sums_could_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 133145\) has no int8 product: .* 133144 at most"):
        Int8Linear(torch.zeros(1, int8_linear.MAX_WIDTH + 1))
