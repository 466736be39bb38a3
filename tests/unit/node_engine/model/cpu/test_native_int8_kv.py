"""KV in int8 with the native kernels, beside the reference and the torch engine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import NodeFailed
from kv_kernels.native.native_library import CpuFeature
from kv_kernels.reference.int8_kv import SCALE_BYTES, decode_rows, encode_rows
from node_engine.core.step.step_batch import StepBatch
from node_engine.model.common.base_engine import TORCH_DTYPES
from node_engine.model.config.model_config import ModelConfig
from tests.layer_callbacks import FunctionCallback
from tests.unit.kv_kernels.native.cpu_features import FEATURE_PARAMS
from tests.unit.node_engine.model.cpu.native_engines import (
    BLOCK_SIZE,
    CONFIG,
    CONFIGS,
    NUM_BLOCKS,
    BoundEngine,
    find_largest_difference,
    list_steps,
    load_engine,
    make_native,
    make_prompt,
    make_reference,
    make_slice,
    needs_native_kernels,
    run_all,
)

pytestmark = needs_native_kernels
FEATURES = pytest.mark.parametrize("features", FEATURE_PARAMS)


def read_layers(bound: BoundEngine) -> torch.Tensor:
    """The cache as [blocks, layers, 2, kv_heads, block_size, row]."""
    layout = bound.engine.layout
    shape = NUM_BLOCKS, layout.num_layers, 2, layout.num_kv_heads, BLOCK_SIZE, -1
    return bound.read_cache().view(shape)


def list_tokens(cache: torch.Tensor, layer: int) -> torch.Tensor:
    """The rows of one layer as [tokens, 2, kv_heads, row], in the order of sequence 0."""
    return cache[:, layer].movedim(3, 1).flatten(0, 1)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 3))
    return replace(
        CONFIG,
        hidden_size=draw(st.integers(9, 70)),
        head_dim=draw(st.integers(1, 20)) * 4,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 5)),
        windows=(draw(st.sampled_from([None, 1, 20, 70])), None),
        qk_norm=draw(st.booleans()),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@FEATURES
@settings(max_examples=25, deadline=None)
@given(config=configs(), length=st.integers(1, 130), seed=st.integers(0, 9))
def test_rows_and_attention_equal_the_reference(
    dtype: str, features: CpuFeature, config: ModelConfig, length: int, seed: int
) -> None:
    """Bit for bit: rows are encoded as the reference does, and attention reads what it decodes.

    An engine over an unquantized cache attends to the decoded rows: they take the place of its own
    in each layer, after it has written these and before it attends.
    """
    quantized = make_native(config, dtype, kv_dtype="int8", features=features)
    plain = make_native(config, dtype, features=features)
    step = StepBatch((make_slice(0, make_prompt(length, seed), 0),))
    expected = quantized.engine.run(step)
    rows, numbers = read_layers(quantized), read_layers(plain)

    def on_layer(layer: int) -> None:
        if dtype == "float32":
            expected_rows = encode_rows(list_tokens(numbers, layer)[:length])
            assert torch.equal(list_tokens(rows, layer)[:length], expected_rows)
        numbers[:, layer] = decode_rows(rows[:, layer], TORCH_DTYPES[dtype])

    assert plain.engine.run(step, FunctionCallback(on_layer)) == expected


@FEATURES
@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_near_those_of_the_torch_engine(name: str, features: CpuFeature) -> None:
    native = make_native(CONFIGS[name], kv_dtype="int8", features=features)
    reference = make_reference(CONFIGS[name], kv_dtype="int8")
    found, expected = run_all(native), run_all(reference)
    assert find_largest_difference(found, expected) < 0.02
    decoded = [decode_rows(read_layers(bound), torch.float32) for bound in (native, reference)]
    scales = read_layers(reference)[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    assert (decoded[0] - decoded[1]).abs().le(1.01 * scales + 1e-6).all()


def test_steps_in_bfloat16_are_near_those_without_quantization() -> None:
    for name, config in CONFIGS.items():
        plain = run_all(make_native(config, "bfloat16"))
        found = run_all(make_native(config, "bfloat16", kv_dtype="int8"))
        assert 0.0 < find_largest_difference(found, plain) < 0.1, name


def test_identity_names_both_dtypes() -> None:
    engine = load_engine(CONFIG, "bfloat16", kv_dtype="int8")
    identity = engine.model_identity
    assert (identity.dtype, identity.layout.dtype) == ("bfloat16", "int8")


def test_what_follows_the_newest_token_in_its_block_is_cleared() -> None:
    bound = make_native(CONFIG, kv_dtype="int8")
    cache = read_layers(bound)
    cache.fill_(7)
    bound.run(make_slice(0, make_prompt(20), 0))
    assert cache[1, :, :, :, :4].any()
    assert not cache[1, :, :, :, 4:].any()
    assert (cache[2:] == 7).all()


def test_blocks_are_copied_with_their_scales() -> None:
    bound = make_native(CONFIG, kv_dtype="int8")
    for step in list_steps():
        bound.engine.run(step)
    assert torch.equal(read_layers(bound)[11], read_layers(bound)[2])


@pytest.mark.parametrize("kind", [0, 1], ids=["key", "value"])
def test_damaged_scale_is_found_in_the_logits(kind: int) -> None:
    bound = make_native(CONFIG, kv_dtype="int8")
    bound.run(make_slice(0, make_prompt(20), 0))
    damaged = read_layers(bound)[0, 1, kind, 1, 3, -SCALE_BYTES:]
    damaged.copy_(torch.tensor([float("nan")]).view(torch.int8))
    with pytest.raises(NodeFailed, match="not finite"):
        bound.run(make_slice(0, [1], 20))


@FEATURES
def test_row_that_is_not_finite_has_no_finite_scale(features: CpuFeature) -> None:
    config = replace(CONFIG, rope=replace(CONFIG.rope, theta=0.0))  # angles are not finite
    bound = make_native(config, kv_dtype="int8", features=features)
    with pytest.raises(NodeFailed, match="not finite"):
        bound.run(make_slice(0, [1, 2, 3], 0))
    keys = list_tokens(read_layers(bound), 0)[:3, 0]
    assert not keys[..., :-SCALE_BYTES].any()
    assert keys[..., -SCALE_BYTES:].contiguous().view(torch.float32).isnan().all()
