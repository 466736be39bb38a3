"""FLOPs and bytes of a step, against numbers computed by hand and against counting one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.blocks import KVLayout
from baton.models.model_identity import NATIVE_IMPLEMENTATION, UNQUANTIZED, ModelIdentity
from baton.types import SamplingParams
from node_engine.core.metrics.step_costs import (
    StepCosts,
    count_context_tokens,
    get_product_precision,
)
from node_engine.core.step.engine import ModelSize
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
from node_engine.model.config.model_config import parse_model_config
from node_engine.model.config.model_size import build_model_size
from tests.unit.node_engine.core.metrics.llama_8b import LLAMA_8B, LLAMA_8B_LAYOUT, NO_DEFAULTS

DRAWN = SampleSpec(SamplingParams(8), 0, 0)


def make_slice(
    start: int,
    count: int,
    sample_spec: SampleSpec | None = DRAWN,
    scored: PromptLogprobsSpec | None = None,
) -> SequenceSlice:
    return SequenceSlice(SequenceId(0), (1,) * count, start, (), sample_spec, scored)


def make_identity(layout: KVLayout, quantization: str = UNQUANTIZED) -> ModelIdentity:
    return ModelIdentity(NATIVE_IMPLEMENTATION, "ab", layout.dtype, quantization, layout, 10, ())


# Two layers, the second with a window; 4 heads of 8 dimensions, 1 KV head: 2 * 8 * 2 bytes a token.
SIZE = ModelSize(layer_parameters=1000, head_parameters=300, attention_width=32, windows=(None, 4))
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")
COSTS = StepCosts(SIZE, make_identity(LAYOUT))


def test_decode_step() -> None:
    work = COSTS.measure_step(StepBatch((make_slice(9, 1), make_slice(2, 1))))
    # contexts of 10 and 3 tokens in the first layer, 4 and 3 in the second
    assert work.flops == 2 * 2 * (1000 + 300) + 4 * 32 * (10 + 3 + 4 + 3)
    assert work.memory_bytes == 2 * (1000 + 300) + 32 * (10 + 3 + 4 + 3) + 32 * 2 * 2


def test_prefill_chunk_reads_no_head() -> None:
    work = COSTS.measure_step(StepBatch((make_slice(2, 4, None),)))
    # queries attend to 3, 4, 5, 6 tokens in the first layer, to 3, 4, 4, 4 in the second, which
    # reads the KV of all six: the first query's window begins at the first token
    assert work.flops == 2 * 4 * 1000 + 4 * 32 * (3 + 4 + 5 + 6 + 3 + 4 + 4 + 4)
    assert work.memory_bytes == 2 * 1000 + 32 * (6 + 6) + 32 * 2 * 4


def test_head_is_computed_for_sampled_and_scored_rows() -> None:
    scored = make_slice(0, 3, DRAWN, PromptLogprobsSpec((5, 6), top_logprobs=0))
    unsampled = COSTS.measure_step(StepBatch((make_slice(0, 3, None),)))
    work = COSTS.measure_step(StepBatch((scored,)))
    assert work.flops - unsampled.flops == 2 * 300 * 3
    assert work.memory_bytes - unsampled.memory_bytes == 2 * 300


@pytest.mark.parametrize(
    ("dtype", "quantization", "precision", "weight_bytes"),
    [
        ("float32", UNQUANTIZED, "float32", 4 * 1000 + 4 * 300),
        ("bfloat16", UNQUANTIZED, "bfloat16", 2 * 1000 + 2 * 300),
        ("bfloat16", "fp8", "fp8", 1000 + 2 * 300),
        ("float32", "int8", "int8", 1000 + 300),
        ("bfloat16", "int8", "int8", 1000 + 300),
    ],
)
def test_weights_are_read_in_their_own_precision(
    dtype: str, quantization: str, precision: str, weight_bytes: int
) -> None:
    layout = KVLayout(2, 1, 8, 16, dtype)
    identity = make_identity(layout, quantization)
    assert get_product_precision(identity) == precision
    work = StepCosts(SIZE, identity).measure_step(StepBatch((make_slice(0, 1),)))
    assert work.memory_bytes == weight_bytes + layout.token_bytes * 2


@given(
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 50) | st.none(),
)
def test_contexts_are_counted_as_one_by_one(start: int, count: int, window: int | None) -> None:
    seen = [
        range(max(0, place + 1 - window) if window else 0, place + 1)
        for place in range(start, start + count)
    ]
    expected = sum(map(len, seen)), len({token for each in seen for token in each})
    assert count_context_tokens((make_slice(start, count),), window) == expected


def test_size_of_an_8b_model() -> None:
    size = build_model_size(parse_model_config(LLAMA_8B, NO_DEFAULTS))
    # a layer: 4096 * 6144 and 4096 * 4096 in attention, 3 * 4096 * 14336 in the MLP
    assert size.layer_parameters == 32 * (25_165_824 + 16_777_216 + 176_160_768)
    assert size.head_parameters == 4096 * 128_256
    assert (size.attention_width, size.windows) == (4096, (None,) * 32)
    costs = StepCosts(size, make_identity(LLAMA_8B_LAYOUT))
    step = costs.measure_step(StepBatch((make_slice(191, 1),)))
    # 15.0 GB of weights, and 128 KiB for each of 192 tokens that are read and one that is written
    assert step.memory_bytes == 15_009_316_864 + 193 * 131_072
    assert step.flops == 2 * 7_504_658_432 + 4 * 4096 * 192 * 32
