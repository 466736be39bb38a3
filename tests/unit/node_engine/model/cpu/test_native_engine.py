"""The native engine beside the torch engine, and what it promises on its own."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import NodeFailed
from baton.models.model_identity import INT8, UNQUANTIZED, Quantization
from baton.types import TokenLogprobs
from kv_kernels.native.model import NativeModel
from kv_kernels.native.native_library import CpuFeature
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
from tests.layer_callbacks import FunctionCallback
from tests.unit.kv_kernels.native.cpu_features import FEATURE_PARAMS
from tests.unit.node_engine.model.cpu.native_engines import (
    BLOCK_SIZE,
    CONFIG,
    CONFIGS,
    NUM_BLOCKS,
    TABLES,
    BoundEngine,
    find_largest_difference,
    list_blocks,
    load_engine,
    make_native,
    make_prompt,
    make_reference,
    make_slice,
    needs_native_kernels,
    run_all,
)

pytestmark = needs_native_kernels
LARGE_FACTOR = 1e5  # of keys: without their maximum, exponentials of their scores overflow


@pytest.mark.parametrize("features", FEATURE_PARAMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_torch_engine(name: str, features: CpuFeature) -> None:
    native = make_native(CONFIGS[name], features=features)
    reference = make_reference(CONFIGS[name])
    found, expected = run_all(native), run_all(reference)
    assert [result.token_id for result in found] == [result.token_id for result in expected]
    assert find_largest_difference(found, expected) < 1e-4
    torch.testing.assert_close(native.read_cache(), reference.read_cache(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features", FEATURE_PARAMS)
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


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", ""), ("bfloat16", ""), ("float32", "int8"), ("bfloat16", "int8")],
)
@pytest.mark.parametrize("quantization", [UNQUANTIZED, INT8])
@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 99), max_size=4, unique=True).map(sorted),
    threads=st.integers(1, 3),
    others=st.integers(0, 2),
)
def test_result_depends_on_nothing_but_the_sequence(
    dtype: str,
    kv_dtype: str,
    quantization: Quantization,
    cuts: list[int],
    threads: int,
    others: int,
) -> None:
    """Bit for bit: not on chunks, not on other sequences of a step, not on the threads."""
    prompt = make_prompt(100)
    config = CONFIGS["windows"]
    formats = {"quantization": quantization, "kv_dtype": kv_dtype}
    alone = make_native(config, dtype, threads=1, **formats)
    (expected,) = alone.run(make_slice(0, prompt, 0))
    bound = make_native(config, dtype, threads=threads, **formats)
    for begin, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        company = [make_slice(1 + i, make_prompt(5 + i, end), 0) for i in range(others)]
        found = bound.run(*company, make_slice(0, prompt[begin:end], begin))[-1]
    assert found == expected
    blocks = -(-len(prompt) // BLOCK_SIZE)
    size = alone.read_cache().numel() // NUM_BLOCKS * blocks
    assert torch.equal(bound.read_cache()[:size], alone.read_cache()[:size])


@pytest.mark.parametrize("features", FEATURE_PARAMS)
def test_later_keys_may_have_much_larger_scores(features: CpuFeature) -> None:
    """Their exponentials would overflow if the maximum of the first keys were kept."""
    native, reference = make_native(CONFIG, features=features), make_reference(CONFIG)
    prompt = make_prompt(100)
    for bound in (native, reference):
        bound.run(make_slice(0, prompt, 0))
        shape = (NUM_BLOCKS, CONFIG.num_layers, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_dim)
        bound.read_cache().view(shape)[64 // BLOCK_SIZE :, :, 0] *= LARGE_FACTOR
    found, expected = (bound.run(make_slice(0, [7], 100)) for bound in (native, reference))
    assert found[0].token_id == expected[0].token_id
    assert find_largest_difference(found, expected) < 1e-3


def compute_prompt_logprobs(
    bound: BoundEngine, prompt: list[int], length: int, begin: int = 0
) -> list[TokenLogprobs]:
    """Compute a prompt in chunks of `length` tokens, after a first one of `begin` tokens if any."""
    found: list[TokenLogprobs] = []
    bounds = [0, *range(begin or length, len(prompt), length), len(prompt)]
    for first, end in pairwise(bounds):
        chunk = prompt[first:end]
        slice_ = make_slice(0, chunk, first, scores=PromptLogprobsSpec(tuple(chunk), 0))
        (result,) = bound.run(replace(slice_, block_table=list_blocks(0, NUM_BLOCKS)))
        found += result.prompt_logprobs
    return found


@pytest.mark.parametrize("features", FEATURE_PARAMS)
def test_scores_do_not_depend_on_how_many_keys_a_chunk_has(features: CpuFeature) -> None:
    """Another order of a sum shows in one rounded number of 100,000, so there are 10 million."""
    config = replace(CONFIG, num_heads=32, num_kv_heads=32, head_dim=64)
    bound = make_native(config, "bfloat16", features=features)
    for seed in range(24):
        prompt = make_prompt(192, seed)
        whole = compute_prompt_logprobs(bound, prompt, len(prompt))
        assert compute_prompt_logprobs(bound, prompt, BLOCK_SIZE) == whole
    # With AMX, more tiles are multiplied beside the last of 33 rows than one at a time.
    assert compute_prompt_logprobs(bound, prompt, 33) == whole


@pytest.mark.parametrize("windows", [(None, None), (20, 200)], ids=["all keys", "windows"])
@pytest.mark.parametrize("features", FEATURE_PARAMS)
def test_few_queries_behind_many_keys_have_the_scores_of_a_prompt(
    features: CpuFeature, windows: tuple[int | None, ...]
) -> None:
    config = replace(CONFIG, num_heads=14, head_dim=64, windows=windows)
    bound = make_native(config, "bfloat16", features=features)
    for length in (1, 2):
        prompt = make_prompt(310, length)
        whole = compute_prompt_logprobs(bound, prompt, len(prompt))
        assert compute_prompt_logprobs(bound, prompt, length, begin=180) == whole


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


def test_waits_for_the_lock_of_python_slow_a_step_that_reports_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One wait for each layer that is reported. The end of the step is in any step."""
    bound = make_native(CONFIG)
    run_halves = NativeModel.run_halves

    def wait_for_lock(model: NativeModel, first: int, end: int) -> float:
        assert run_halves(model, first, end) >= 0.0
        return 0.5

    monkeypatch.setattr(NativeModel, "run_halves", wait_for_lock)
    callback = FunctionCallback(lambda layer: None)
    bound.engine.run(StepBatch((make_slice(0, [1, 2, 3], 0),)), callback)
    assert callback.slowed_seconds == CONFIG.num_layers * 0.5


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


def test_engine_says_what_it_packed() -> None:
    device = load_engine(CONFIG).compute_device
    parameters = CONFIG.num_layers * CONFIG.hidden_size * CONFIG.intermediate_size * 3
    assert device.packed_weight_bytes > 4 * parameters
    assert device.packed_weight_source == "checkpoint"


def test_warm_up_computes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = make_native(CONFIG)
    ran: list[StepBatch] = []
    monkeypatch.setattr(bound.engine, "run", ran.append)
    bound.engine.warm_up(64)
    assert [step.num_tokens for step in ran] == [5, 0]
