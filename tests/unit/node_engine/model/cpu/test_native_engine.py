"""The native engine beside the torch engine, and what it promises on its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import NodeFailed
from baton.kv.blocks import KVLayout
from baton.models.model_identity import INT8, UNQUANTIZED, Quantization
from baton.types import BlockIndex, SamplingParams
from kv_kernels.native.native_library import CpuFeature, NativeLibrary, load_library
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)
from node_engine.model.common.base_engine import TORCH_DTYPES, BaseEngine
from node_engine.model.config.model_config import ModelConfig
from node_engine.model.config.rope import RopeConfig
from node_engine.model.cpu.native_loader import load_native_engine
from node_engine.model.loading.resolved_model import ResolvedModel
from node_engine.model.loading.weights import build_dummy_weights
from node_engine.model.model_engine import ModelEngine
from node_engine.model.sampling.sampler import sample_tokens
from node_engine.model.transformer import Transformer
from tests.layer_callbacks import FunctionCallback

_LIBRARY = load_library()
pytestmark = pytest.mark.skipif(
    not isinstance(_LIBRARY, NativeLibrary), reason=f"no native kernels: {_LIBRARY.describe()}"
)
ALL_FEATURES = CpuFeature(15)
BLOCK_SIZE = 16
NUM_BLOCKS = 24
CPU = torch.device("cpu")
GREEDY = SamplingParams(1, temperature=0.0, logprobs=5)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=131,
    hidden_size=72,
    intermediate_size=100,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=12,
    norm_eps=1e-5,
    max_position_embeddings=512,
    tied_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=False,
    windows=(None, None),
    rope=RopeConfig("default", 10000.0),
    stored_dtype="float32",
    eos_token_ids=(),
)
CONFIGS = {
    "odd": CONFIG,
    "qk-norm": replace(CONFIG, qk_norm=True, head_dim=16, num_kv_heads=6, qkv_bias=False),
    "windows": replace(CONFIG, windows=(20, 70), head_dim=64, num_heads=8, num_kv_heads=1),
    "tied": replace(CONFIG, tied_embeddings=True, hidden_size=130, mlp_bias=False),
}


def list_blocks(first: int, count: int) -> list[BlockIndex]:
    return [BlockIndex(block) for block in range(first, first + count)]


TABLES = [list_blocks(0, 12), list_blocks(12, 8), list_blocks(20, 4)]


class BoundEngine:
    """An engine with an arena of its own."""

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self.arena = memoryview(bytearray(engine.layout.block_bytes * NUM_BLOCKS))
        engine.bind_cache(self.arena, NUM_BLOCKS)

    def run(self, *slices: SequenceSlice) -> tuple[SliceResult, ...]:
        return self.engine.run(StepBatch(slices))

    def read_cache(self) -> torch.Tensor:
        return torch.frombuffer(self.arena, dtype=TORCH_DTYPES[self.engine.layout.dtype])


def make_layout(config: ModelConfig, dtype: str) -> KVLayout:
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)


def load_engine(
    config: ModelConfig,
    dtype: str = "float32",
    *,
    threads: int = 2,
    quantization: Quantization = UNQUANTIZED,
    features: CpuFeature = ALL_FEATURES,
) -> BaseEngine:
    assert isinstance(_LIBRARY, NativeLibrary)
    _LIBRARY.functions.kvn_limit_cpu_features(features)
    try:
        model = ResolvedModel(
            Path(),
            config,
            make_layout(config, dtype),
            dtype,
            quantization,
            CPU,
            config.max_position_embeddings,
        )
        return load_native_engine(model, _LIBRARY, threads, is_dummy=True)
    finally:
        _LIBRARY.functions.kvn_limit_cpu_features(ALL_FEATURES)


def make_native(config: ModelConfig, dtype: str = "float32", **options: Any) -> BoundEngine:
    return BoundEngine(load_engine(config, dtype, **options))


def make_reference(
    config: ModelConfig, dtype: str = "float32", quantization: Quantization = UNQUANTIZED
) -> BoundEngine:
    kernels = TorchKernels()
    weights = build_dummy_weights(config, TORCH_DTYPES[dtype], CPU, kernels, quantization)
    model = Transformer(config, weights, kernels)
    longest = config.max_position_embeddings
    layout = make_layout(config, dtype)
    return BoundEngine(
        ModelEngine(config, model, kernels, layout, CPU, longest, weights.digest, sample_tokens)
    )


def make_slice(
    sequence: int,
    token_ids: Sequence[int],
    start: int,
    *,
    is_sampled: bool = True,
    scores: PromptLogprobsSpec | None = None,
) -> SequenceSlice:
    end = start + len(token_ids)
    spec = SampleSpec(GREEDY, 0, end) if is_sampled else None
    return SequenceSlice(
        SequenceId(sequence), tuple(token_ids), start, TABLES[sequence], spec, scores
    )


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, CONFIG.vocab_size, (length,), generator=generator).tolist()
    return drawn


def list_steps() -> list[StepBatch]:
    """Prompts in chunks, decode slices between them, a slice that samples nothing, a copy."""
    a, b, c = make_prompt(70, 1), make_prompt(123, 2), make_prompt(3, 3)
    return [
        StepBatch((make_slice(0, a, 0),)),
        StepBatch((make_slice(0, [5], 70), make_slice(1, b[:33], 0, is_sampled=False))),
        StepBatch((make_slice(1, b[33:], 33), make_slice(0, [9], 71), make_slice(2, c, 0))),
        StepBatch(
            (make_slice(1, [3], 123), make_slice(0, [9], 72), make_slice(2, [7], 3)),
            block_copies=((BlockIndex(2), BlockIndex(11)),),
        ),
    ]


def run_all(bound: BoundEngine) -> list[SliceResult]:
    return [result for step in list_steps() for result in bound.engine.run(step)]


def find_largest_difference(a: Sequence[SliceResult], b: Sequence[SliceResult]) -> float:
    """The largest difference of log probabilities of tokens that both results have."""
    largest = 0.0
    for one, other in zip(a, b, strict=True):
        if one.logprobs is None or other.logprobs is None:
            assert one.logprobs is other.logprobs
            continue
        known = dict(other.logprobs.top_logprobs)
        pairs = [(value, known[t]) for t, value in one.logprobs.top_logprobs if t in known]
        assert pairs
        largest = max(largest, *(abs(value - expected) for value, expected in pairs))
    return largest


@pytest.mark.parametrize("features", [ALL_FEATURES, CpuFeature.AVX2], ids=["all", "avx2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_torch_engine(name: str, features: CpuFeature) -> None:
    native = make_native(CONFIGS[name], features=features)
    reference = make_reference(CONFIGS[name])
    found, expected = run_all(native), run_all(reference)
    assert [result.token_id for result in found] == [result.token_id for result in expected]
    assert find_largest_difference(found, expected) < 1e-4
    torch.testing.assert_close(native.read_cache(), reference.read_cache(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features", [ALL_FEATURES, CpuFeature.AVX2], ids=["all", "avx2"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantization", [UNQUANTIZED, INT8])
def test_bfloat16_is_as_close_to_float32_as_the_torch_engine(
    name: str, quantization: Quantization, features: CpuFeature
) -> None:
    """The residual stream and the sums are in float32: only products round to bfloat16."""
    config = CONFIGS[name]
    exact = run_all(make_reference(config, "float32", quantization))
    native = run_all(make_native(config, "bfloat16", quantization=quantization, features=features))
    reference = run_all(make_reference(config, "bfloat16", quantization))
    error = find_largest_difference(native, exact)
    assert 0 < error < 1.5 * find_largest_difference(reference, exact) + 0.005


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [UNQUANTIZED, INT8])
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 99), max_size=4, unique=True).map(sorted),
    threads=st.integers(1, 3),
    others=st.integers(0, 2),
)
def test_result_depends_on_nothing_but_the_sequence(
    dtype: str, quantization: Quantization, cuts: list[int], threads: int, others: int
) -> None:
    """Bit for bit: not on chunks, not on other sequences of a step, not on the threads."""
    prompt = make_prompt(100)
    config = CONFIGS["windows"]
    alone = make_native(config, dtype, threads=1, quantization=quantization)
    (expected,) = alone.run(make_slice(0, prompt, 0))
    bound = make_native(config, dtype, threads=threads, quantization=quantization)
    for begin, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        company = [make_slice(1 + i, make_prompt(5 + i, end), 0) for i in range(others)]
        found = bound.run(*company, make_slice(0, prompt[begin:end], begin))[-1]
    assert found == expected
    blocks = -(-len(prompt) // BLOCK_SIZE)
    size = alone.read_cache().numel() // NUM_BLOCKS * blocks
    assert torch.equal(bound.read_cache()[:size], alone.read_cache()[:size])


def test_layers_are_reported_when_their_kv_is_there() -> None:
    bound = make_native(CONFIG)
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        layers = bound.read_cache().view(NUM_BLOCKS, CONFIG.num_layers, -1)
        written = [bool(layers[0, index].any()) for index in range(CONFIG.num_layers)]
        assert written == [index <= layer for index in range(CONFIG.num_layers)]
        seen.append(layer)

    step = StepBatch((make_slice(0, [1, 2, 3], 0),))
    bound.engine.run(step, FunctionCallback(on_layer))
    assert seen == list(range(CONFIG.num_layers))


def test_prompt_logprobs_equal_those_of_the_torch_engine() -> None:
    prompt = make_prompt(40)
    scores = PromptLogprobsSpec(tuple(prompt[1:]), 3)
    slices = make_slice(1, [4, 5], 0), make_slice(0, prompt, 0, scores=scores)
    found = make_native(CONFIG).run(*slices)
    expected = make_reference(CONFIG).run(*slices)
    assert [result.token_id for result in found] == [result.token_id for result in expected]
    pairs = zip(found[1].prompt_logprobs, expected[1].prompt_logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4


def test_what_follows_the_newest_token_in_its_block_is_cleared() -> None:
    bound = make_native(CONFIG)
    cache = bound.read_cache().view(NUM_BLOCKS, CONFIG.num_layers, 2, 2, BLOCK_SIZE, -1)
    cache.fill_(7.0)
    bound.run(make_slice(0, make_prompt(20), 0))
    assert not cache[1, :, :, :, 4:].any()
    assert (cache[2:] == 7.0).all()


@pytest.mark.parametrize(
    ("slice_", "message"),
    [
        (SequenceSlice(SequenceId(3), (), 0, TABLES[0], None), "0 tokens"),
        (SequenceSlice(SequenceId(3), (1,), 64, TABLES[2], None), "in 4 blocks of 16"),
        (SequenceSlice(SequenceId(3), (131,), 0, TABLES[0], None), "out of bounds"),
        (SequenceSlice(SequenceId(3), (-1,), 0, TABLES[0], None), "out of bounds"),
        (SequenceSlice(SequenceId(3), (1,), 0, list_blocks(24, 1), None), "out of bounds"),
    ],
)
def test_impossible_step_is_refused_before_it_computes(slice_: SequenceSlice, message: str) -> None:
    bound = make_native(CONFIG)
    with pytest.raises(ValueError, match=message):
        bound.run(slice_)
    assert not bound.read_cache().any()


def test_damaged_cache_is_found_in_the_logits() -> None:
    bound = make_native(CONFIG)
    bound.run(make_slice(0, make_prompt(20), 0))
    cache = bound.read_cache().view(NUM_BLOCKS, CONFIG.num_layers, 2, 2, BLOCK_SIZE, -1)
    for kind in (0, 1):
        cache[0, 1, kind, 1, 3, 2] = float("nan")
        with pytest.raises(NodeFailed, match="not finite"):
            bound.run(make_slice(0, [1], 20))
        cache[0, 1, kind, 1, 3, 2] = 0.0


def test_engine_without_a_cache_computes_nothing() -> None:
    engine = load_engine(CONFIG)
    with pytest.raises(RuntimeError, match="bind_cache"):
        engine.run(StepBatch((make_slice(0, [1], 0),)))
