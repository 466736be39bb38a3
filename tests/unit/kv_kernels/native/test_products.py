"""Native products against torch, for odd shapes, in every format and instruction set."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_kernels.native.matrix import IncompressibleWeightsError, MatrixLayout
from kv_kernels.native.model import NativeModel
from kv_kernels.native.native_library import CpuFeature, NativeLibrary, load_library
from kv_kernels.native.structures import Format, KvnLayer, KvnLinear, KvnModel
from kv_kernels.reference.int8_linear import Int8Linear
from tests.unit.kv_kernels.native.cpu_features import (
    ALL_FEATURES,
    FEATURE_PARAMS,
    list_feature_sets,
)

_LIBRARY = load_library()
pytestmark = pytest.mark.skipif(
    not isinstance(_LIBRARY, NativeLibrary), reason=f"no native kernels: {_LIBRARY.describe()}"
)
_DTYPES = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16}
_ACTIVATIONS = {  # of a matrix that is stored in a format
    Format.FLOAT32: Format.FLOAT32,
    Format.BFLOAT16: Format.BFLOAT16,
    Format.INT8: Format.BFLOAT16,
    Format.COMPACT_BFLOAT16: Format.BFLOAT16,
}


def get_functions() -> ctypes.CDLL:
    assert isinstance(_LIBRARY, NativeLibrary)
    return _LIBRARY.functions


@contextmanager
def limited_features(features: CpuFeature) -> Iterator[None]:
    """Models made meanwhile use no other instructions."""
    get_functions().kvn_limit_cpu_features(features)
    try:
        yield
    finally:
        get_functions().kvn_limit_cpu_features(ALL_FEATURES)


def make_model(activations: Format, threads: int = 2) -> NativeModel:
    """A model without layers, for single products."""
    model = KvnModel(format=activations, hidden=16, heads=1, kv_heads=1, head_dim=16, vocab=16)
    return NativeModel(get_functions(), model, list[KvnLayer](), threads, [])


class PackedMatrix:
    """A packed matrix and what it was packed from."""

    def __init__(self, layout: MatrixLayout, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = 2 if layout.is_gated else 1
        shape = layout.outputs, layout.inputs
        self.weights = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
        self.biases = [torch.randn(shape[0], generator=generator).to(dtype) for _ in range(count)]
        self.region = np.zeros(layout.nbytes, np.uint8)
        self._biases = self.biases if layout.has_bias else []
        layout.pack(get_functions(), self.region.data, self.weights, self._biases)
        self.linear: KvnLinear = layout.describe(self.region.ctypes.data)

    def multiply_with_torch(self, x: torch.Tensor, stored: Format) -> torch.Tensor:
        """The product by torch, in float64 unless it is int8."""
        biases: Sequence[torch.Tensor | None] = self._biases or [None] * len(self.weights)
        parts = []
        for weight, bias in zip(self.weights, biases, strict=True):
            if stored is Format.INT8:
                wide = None if bias is None else bias.float()
                parts.append(Int8Linear(weight.float(), wide)(x.float()).double())
            else:
                wide = None if bias is None else bias.double()
                parts.append(torch.nn.functional.linear(x.double(), weight.double(), wide))
        if len(parts) == 1:
            return parts[0]
        return torch.nn.functional.silu(parts[0]) * parts[1]


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 90),
    rows=st.sampled_from([1, 2, 5, 6, 7, 12, 13, 16, 24, 25, 37, 61, 64, 65, 113]),
    activations=st.sampled_from([Format.FLOAT32, Format.BFLOAT16]),
    is_int8=st.booleans(),
    is_compact=st.booleans(),
    is_gated=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_equals_that_of_torch(
    features: CpuFeature,
    inputs: int,
    outputs: int,
    rows: int,
    activations: Format,
    is_int8: bool,
    is_compact: bool,
    is_gated: bool,
    has_bias: bool,
    seed: int,
) -> None:
    stored = Format.INT8 if is_int8 else activations
    if stored is Format.BFLOAT16 and is_compact:
        stored = Format.COMPACT_BFLOAT16
    layout = MatrixLayout(inputs, outputs, stored, is_gated, has_bias)
    matrix = PackedMatrix(layout, _DTYPES[activations], seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, inputs, generator=generator).to(_DTYPES[activations])
    with limited_features(features):
        found = make_model(activations).multiply(matrix.linear, x)
    expected = matrix.multiply_with_torch(x, stored)
    # The products themselves are exact in float32: what differs is the rounding of their sum.
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5 * inputs**0.5)


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("stored", list(Format))
def test_row_does_not_depend_on_the_other_rows_or_the_threads(
    features: CpuFeature, stored: Format
) -> None:
    activations = _ACTIVATIONS[stored]
    matrix = PackedMatrix(MatrixLayout(96, 80, stored, True, True), _DTYPES[activations], 3)
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).to(_DTYPES[activations])
    with limited_features(features):
        alone = make_model(activations, threads=1)
        expected = torch.cat([alone.multiply(matrix.linear, row[None]) for row in x])
        for threads in (1, 2, 3):
            model = make_model(activations, threads)
            for rows in (2, 9, 17, 30, 64):
                found = model.multiply(matrix.linear, x[:rows])
                assert torch.equal(found, expected[:rows]), (threads, rows)


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("stored", list(Format))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_reaches_the_result(
    features: CpuFeature, stored: Format, value: float
) -> None:
    """It is found in the logits: no kernel may lose it on the way."""
    matrix = PackedMatrix(MatrixLayout(40, 20, stored), torch.float32, 0)
    activations = Format.FLOAT32 if stored is Format.INT8 else _ACTIVATIONS[stored]
    x = torch.ones(3, 40, dtype=_DTYPES[activations])
    x[1, 7] = value
    with limited_features(features):
        found = make_model(activations).multiply(matrix.linear, x)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 5, 63])
def test_weight_that_is_not_finite_stays_so_in_int8(
    features: CpuFeature, dtype: torch.dtype, value: float, place: int
) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3, place] = value
    _memory, linear = pack_matrix(Format.INT8, weight)
    x = torch.ones(17, 64)
    with limited_features(features):
        found = make_model(Format.FLOAT32).multiply(linear, x)
    assert found[:, 3].isnan().all()
    assert Int8Linear(weight.float())(x)[:, 3].isnan().all()
    assert found[:, [i for i in range(16) if i != 3]].isfinite().all()


def test_int8_integers_are_those_of_the_reference() -> None:
    """With scales that are powers of two, nothing but the integers decides."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-127, 128, (33, 70), generator=generator).float()
    x = torch.randint(-127, 128, (9, 70), generator=generator).float()
    weight[:, 0], x[:, 0] = 127, 127
    layout = MatrixLayout(70, 33, Format.INT8)
    region = np.zeros(layout.nbytes, np.uint8)
    layout.pack(get_functions(), region.data, [weight])
    for features in list_feature_sets():
        with limited_features(features):
            model = make_model(Format.FLOAT32)
            found = model.multiply(layout.describe(region.ctypes.data), x)
        assert torch.equal(found, Int8Linear(weight)(x))
        assert torch.equal(found, x @ weight.T)


def pack_matrix(stored: Format, *weights: torch.Tensor) -> tuple[np.ndarray, KvnLinear]:
    """Return the memory of a packed matrix and its description; two weights are gate and up."""
    outputs, inputs = weights[0].shape
    layout = MatrixLayout(inputs, outputs, stored, is_gated=len(weights) == 2)
    region = np.zeros(layout.nbytes, np.uint8)
    layout.pack(get_functions(), region.data, weights)
    return region, layout.describe(region.ctypes.data)


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@settings(max_examples=30, deadline=None)
@given(
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 70),
    rows=st.sampled_from(
        [1, 2, 3, 5, 6, 7, 12, 16, 24, 25, 26, 31, 32, 33, 48, 64, 65, 79, 100, 128, 129, 200]
    ),
    num_rare=st.integers(0, 20),
    is_gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compact_weights_give_the_same_bits(
    features: CpuFeature,
    inputs: int,
    outputs: int,
    rows: int,
    num_rare: int,
    is_gated: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(outputs, inputs, generator=generator).bfloat16() for _ in range(1 + is_gated)
    ]
    for weight in weights:
        # Exponents that few weights of a panel have: tiny, huge, and zeros of both signs.
        places = torch.randint(0, outputs * inputs, (num_rare,), generator=generator)
        values = torch.tensor([1e-20, -1e-30, 3e7, 0.0, -0.0, 1e-38]).bfloat16()
        weight.view(-1)[places] = values[torch.arange(num_rare) % len(values)]
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    plain, compact = (
        pack_matrix(stored, *weights) for stored in (Format.BFLOAT16, Format.COMPACT_BFLOAT16)
    )
    with limited_features(features):
        model = make_model(Format.BFLOAT16)
        expected, found = model.multiply(plain[1], x), model.multiply(compact[1], x)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("stored", [Format.BFLOAT16, Format.COMPACT_BFLOAT16, Format.INT8])
@pytest.mark.parametrize(("outputs", "counts"), [(24, (32, 65, 129, 193)), (600, (73, 361))])
def test_rows_in_several_blocks_equal_each_row_alone(
    outputs: int, counts: tuple[int, ...], features: CpuFeature, stored: Format
) -> None:
    """A row times a matrix gives the same bits in a batch of any size as it does alone.

    Batches with 8,192 inputs are too large for the L2 cache and are cut into blocks of rows, of
    which the last may have one row. With compact (12-bit) weights and many outputs, blocks are
    larger.
    """
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(outputs, 8192, generator=generator).bfloat16()
    x = torch.randn(counts[-1], 8192, generator=generator).bfloat16()
    _memory, linear = pack_matrix(stored, weight)
    with limited_features(features):
        model = make_model(Format.BFLOAT16)
        chosen = (0, 25, 31, 64, 72, 128, 192, 359, 360)
        alone = {row: model.multiply(linear, x[row, None])[0] for row in chosen if row < len(x)}
        for rows in counts:
            found = model.multiply(linear, x[:rows])
            assert all(torch.equal(found[row], alone[row]) for row in chosen if row < rows)


@pytest.mark.parametrize("features", FEATURE_PARAMS)
def test_tasks_of_many_compact_panels_give_the_same_bits(features: CpuFeature) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(1600, 50, generator=generator).bfloat16()
    weight.view(-1)[torch.randint(0, 80_000, (200,), generator=generator)] = -3e7  # rare
    x = torch.randn(13, 50, generator=generator).bfloat16()
    with limited_features(features):
        model = make_model(Format.BFLOAT16)
        plain, compact = (
            pack_matrix(stored, weight) for stored in (Format.BFLOAT16, Format.COMPACT_BFLOAT16)
        )
        assert torch.equal(model.multiply(compact[1], x), model.multiply(plain[1], x))


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("rows", [2, 13, 40])
def test_compact_weights_that_are_not_finite_stay_so(rows: int, features: CpuFeature) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, 5], weight[7, 60] = float("nan"), float("-inf")
    _memory, linear = pack_matrix(Format.COMPACT_BFLOAT16, weight)
    with limited_features(features):
        found = make_model(Format.BFLOAT16).multiply(linear, torch.ones(rows, 64).bfloat16())
    assert found[:, 3].isnan().all()
    assert (found[:, 7] == float("-inf")).all()
    assert found.isfinite().sum() == rows * 14


def test_compact_weights_take_three_quarters_of_the_memory() -> None:
    plain, compact = (
        MatrixLayout(4096, 4096, stored).nbytes
        for stored in (Format.BFLOAT16, Format.COMPACT_BFLOAT16)
    )
    assert 0.75 < compact / plain < 0.755
    assert compact == 256 * get_functions().kvn_panel_bytes(4096, Format.COMPACT_BFLOAT16)


def test_weights_with_too_many_exponents_are_not_compact() -> None:
    exponents = torch.randint(-100, 100, (32, 64), generator=torch.Generator().manual_seed(0))
    with pytest.raises(IncompressibleWeightsError, match="too many different exponents"):
        pack_matrix(Format.COMPACT_BFLOAT16, torch.ldexp(torch.ones(32, 64), exponents).bfloat16())
