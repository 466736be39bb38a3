"""Tokens that the native kernels draw, beside those of the sampler on the host."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from baton.types import SamplingParams
from kv_kernels.native.model import NativeModel
from kv_kernels.native.native_library import CpuFeature, NativeLibrary, load_library
from kv_kernels.native.structures import Format, KvnLayer, KvnModel
from node_engine.core.step.step_batch import SampleSpec
from node_engine.model.cpu.native_engine import describe_draw
from node_engine.model.sampling.sampler import sample_tokens
from tests.unit.kv_kernels.native.cpu_features import ALL_FEATURES, FEATURE_PARAMS

_LIBRARY = load_library()
pytestmark = pytest.mark.skipif(
    not isinstance(_LIBRARY, NativeLibrary), reason=f"no native kernels: {_LIBRARY.describe()}"
)


@pytest.fixture(params=FEATURE_PARAMS)
def features(request: pytest.FixtureRequest) -> CpuFeature:
    chosen: CpuFeature = request.param
    return chosen


def make_model(features: CpuFeature, vocab_size: int) -> NativeModel:
    """A model without layers, for its vocabulary."""
    assert isinstance(_LIBRARY, NativeLibrary)
    functions = _LIBRARY.functions
    model = KvnModel(
        format=Format.FLOAT32, hidden=16, heads=1, kv_heads=1, head_dim=16, vocab=vocab_size
    )
    functions.kvn_limit_cpu_features(features)
    try:
        return NativeModel(functions, model, list[KvnLayer](), 2, [])
    finally:
        functions.kvn_limit_cpu_features(ALL_FEATURES)


def list_specs() -> list[SampleSpec]:
    """All combinations of filters, each at a position and with a seed of its own."""
    combinations = product(
        (0.0, 1e-30, 0.3, 1.0, 2.5), (0.0, 0.02, 0.5), (0, 1, 7, 90), (0.05, 0.9, 0.999, 1.0)
    )
    return [
        SampleSpec(
            SamplingParams(
                max_tokens=1,
                temperature=temperature,
                min_p=min_p,
                top_k=top_k,
                top_p=top_p,
                seed=(number * 0x9E3779B97F4A7C15) % (1 << 64),
            ),
            choice_index=number % 3,
            position=number * 17,
        )
        for number, (temperature, min_p, top_k, top_p) in enumerate(combinations)
    ]


@pytest.mark.parametrize("vocab_size", [5, 131, 4099])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0], ids=["flat", "even", "peaked"])
def test_tokens_are_those_of_the_sampler(
    features: CpuFeature, vocab_size: int, spread: float
) -> None:
    specs = list_specs()
    generator = np.random.default_rng(vocab_size)
    rows = generator.normal(0.0, spread, (len(specs), vocab_size)).astype(np.float32)
    rows[::3] = np.round(rows[::3] * 4) / 4  # equal logits
    rows[1::5, ::2] = -math.inf  # tokens that are forbidden
    logits = torch.from_numpy(rows)
    expected = [result.token_id for result in sample_tokens(logits.clone(), specs)]
    model = make_model(features, vocab_size)
    draws = [describe_draw(spec) for spec in specs]
    assert model.pick_tokens(logits.clone(), draws) == expected


def test_a_row_does_not_depend_on_other_rows(features: CpuFeature) -> None:
    specs = list_specs()[-24:]
    logits = torch.randn(len(specs), 300, generator=torch.Generator().manual_seed(1))
    model = make_model(features, 300)
    draws = [describe_draw(spec) for spec in specs]
    together = model.pick_tokens(logits.clone(), draws)
    alone = [
        model.pick_tokens(row[None].clone(), [draw])[0]
        for row, draw in zip(logits, draws, strict=True)
    ]
    assert alone == together


@pytest.mark.parametrize("place", [0, 20, 36])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_reported(
    features: CpuFeature, place: int, value: float
) -> None:
    logits = torch.zeros(2, 37)
    logits[1, place] = value
    model = make_model(features, 37)
    assert model.pick_tokens(logits.clone(), [describe_draw(list_specs()[0])] * 2) == [0, -1]
    hidden = torch.full((1, 37), -math.inf)
    assert model.pick_tokens(hidden, [describe_draw(list_specs()[-1])]) == [-1]
