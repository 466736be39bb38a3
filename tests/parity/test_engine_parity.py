"""ModelEngine against transformers: the same greedy tokens in fp32, for any chunks, batches and
blocks."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baton.types import BlockIndex, SamplingParams
from kv_kernels.dispatch import kernels_for
from kv_kernels.reference.paged_attention import PagedCache
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.config.model_config import load_model_config
from node_engine.model.loading.weights import load_weights
from node_engine.model.model_engine import ForwardBatchBuilder
from node_engine.model.model_loader import load_model_engine
from node_engine.model.transformer import Transformer
from tests.layer_callbacks import FunctionCallback
from tests.models import (
    FamilyName,
    StablePrompt,
    build_model,
    find_stable_prompts,
    load_reference_model,
)
from tests.sequence_runs import (
    GREEDY,
    NEW_TOKENS,
    NUM_BLOCKS,
    SequenceRun,
    ShuffledBlocks,
    run_step,
    run_to_end,
)

LENGTHS = (1, 15, 16, 17, 33, 130, 257)
CPU = torch.device("cpu")


@dataclass
class ParityCase:
    """One model, as transformers and as Baton run it."""

    folder: Path
    reference: PreTrainedModel
    prompts: list[StablePrompt]
    engine: BaseEngine


@pytest.fixture(scope="module", params=["llama", "qwen2", "mistral", "qwen3", "mixed", "linear"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    family: FamilyName = request.param
    folder = build_model(family, tmp_path_factory.getbasetemp() / "models")
    reference = load_reference_model(folder)
    prompts = find_stable_prompts(reference, LENGTHS, NEW_TOKENS)
    return ParityCase(folder, reference, prompts, load_model_engine(folder))


@pytest.fixture
def memory(case: ParityCase) -> bytearray:
    """A bound arena full of NaN: whoever reads what nobody wrote is found out."""
    memory = bytearray(b"\xff" * (NUM_BLOCKS * case.engine.layout.block_bytes))
    case.engine.bind_cache(memoryview(memory), NUM_BLOCKS)
    return memory


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[f"{n} tokens" for n in LENGTHS])
def test_single_sequence_equals_transformers(case: ParityCase, index: int) -> None:
    clear = case.prompts[index]
    run = SequenceRun(
        clear.prompt, ShuffledBlocks().allocate_blocks(len(clear.prompt) + NEW_TOKENS)
    )
    run_to_end(case.engine, [run])
    assert tuple(run.output_tokens) == clear.reference_tokens


@pytest.mark.usefixtures("memory")
def test_changing_batches_with_odd_chunks_equal_transformers(case: ParityCase) -> None:
    blocks, dice = ShuffledBlocks(), random.Random(1)
    runs = [
        SequenceRun(clear.prompt, blocks.allocate_blocks(len(clear.prompt) + NEW_TOKENS))
        for clear in case.prompts
    ]
    chunks = (dice.choice((1, 5, 16, 31, 64, 97)) for _ in iter(int, 1))
    run_step(case.engine, runs[-3:], [7, 100, 64])
    run_to_end(case.engine, runs, chunks)
    assert [tuple(run.output_tokens) for run in runs] == [
        clear.reference_tokens for clear in case.prompts
    ]


@pytest.mark.usefixtures("memory")
def test_a_shared_prefix_is_computed_once(case: ParityCase) -> None:
    first, second = find_stable_prompts(
        case.reference, (130, 100), NEW_TOKENS, seed=3, shared_prefix=case.prompts[-1].prompt[:64]
    )
    blocks = ShuffledBlocks()
    whole = SequenceRun(first.prompt, blocks.allocate_blocks(130 + NEW_TOKENS))
    run_to_end(case.engine, [whole])
    shared = SequenceRun(
        second.prompt,
        whole.blocks[:4] + blocks.allocate_blocks(36 + NEW_TOKENS),
        computed_tokens=64,
    )
    again = SequenceRun(
        first.prompt, whole.blocks[:8] + blocks.allocate_blocks(2 + NEW_TOKENS), computed_tokens=128
    )
    run_to_end(case.engine, [shared, again])
    assert [tuple(run.output_tokens) for run in (whole, shared, again)] == [
        first.reference_tokens,
        second.reference_tokens,
        first.reference_tokens,
    ]


@pytest.mark.usefixtures("memory")
def test_full_prefix_hit_recomputes_its_last_token_in_a_copied_block(case: ParityCase) -> None:
    clear = case.prompts[2]
    assert len(clear.prompt) == 16
    blocks = ShuffledBlocks()
    whole = SequenceRun(clear.prompt, blocks.allocate_blocks(16 + NEW_TOKENS))
    run_to_end(case.engine, [whole])
    hit = SequenceRun(clear.prompt, blocks.allocate_blocks(16 + NEW_TOKENS), computed_tokens=15)
    slice_ = hit.next_slice()
    [made] = case.engine.run(StepBatch((slice_,), block_copies=((whole.blocks[0], hit.blocks[0]),)))
    hit.apply_result(slice_, made)
    run_to_end(case.engine, [hit])
    assert tuple(hit.output_tokens) == clear.reference_tokens


@pytest.mark.usefixtures("memory")
def test_blocks_of_a_finished_sequence_are_reused(case: ParityCase) -> None:
    long, short = case.prompts[-1], case.prompts[1]
    blocks = ShuffledBlocks().allocate_blocks(len(long.prompt) + NEW_TOKENS)
    for clear in (long, short):
        run = SequenceRun(clear.prompt, blocks)
        run_to_end(case.engine, [run])
        assert tuple(run.output_tokens) == clear.reference_tokens


def test_each_layer_is_in_the_arena_when_it_is_announced(
    case: ParityCase, memory: bytearray
) -> None:
    """And the next one is not: what is announced can be sent while the rest is computed."""
    blocks = ShuffledBlocks()
    decoding = SequenceRun(case.prompts[0].prompt, blocks.allocate_blocks(60))
    run_step(case.engine, [decoding], [None])
    prefilling = SequenceRun(case.prompts[-1].prompt, blocks.allocate_blocks(300))
    layers = case.engine.layout.num_layers
    arena = torch.frombuffer(memory, dtype=torch.int32).view(NUM_BLOCKS, layers, -1)
    before, announced = arena.clone(), []

    def on_layer(layer: int) -> None:
        announced.append(arena[:, layer].clone())
        assert len(announced) == layer + 1
        # A GPU may be further than the copies to the arena.
        if case.engine.cache_limits.reads_pool_in_place:
            assert torch.equal(arena[:, layer + 1 :], before[:, layer + 1 :])

    blocks_read = [*decoding.blocks, *prefilling.blocks]
    callback = FunctionCallback(on_layer, blocks_read)
    run_step(case.engine, [decoding, prefilling], [None, 80], callback)
    assert len(announced) == layers
    written = [decoding.blocks[0], *prefilling.blocks[:5]]
    for layer, slabs in enumerate(announced):
        assert torch.equal(slabs, arena[:, layer])
        assert all(not torch.equal(slabs[block], before[block, layer]) for block in written)


def test_logits_equal_transformers(case: ParityCase) -> None:
    config = load_model_config(case.folder)
    kernels = kernels_for(CPU)
    model = Transformer(
        config, load_weights(case.folder, config, torch.float32, CPU, kernels), kernels
    )
    shape = (32, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    cache = PagedCache.from_arena(torch.full(shape, torch.nan))
    planner = ForwardBatchBuilder(kernels, cache, config.windows)
    prompt = case.prompts[-1].prompt
    with torch.inference_mode():
        expected = case.reference(torch.tensor([list(prompt)])).logits[0]
        blocks = tuple(map(BlockIndex, range(17)))
        for start, end in ((0, 100), (100, 101), (101, 257)):
            slice_ = SequenceSlice(
                SequenceId(1), prompt[start:end], start, blocks, SampleSpec(GREEDY, 0, end)
            )
            plan = planner.build_batch(StepBatch((slice_,)))
            cache.arena[plan.partly_filled_blocks] = 0.0
            hidden = model.forward(plan, cache)
            assert hidden is not None
            logits = model.compute_logits(hidden)
            torch.testing.assert_close(logits[0], expected[end - 1], atol=1e-4, rtol=0.0)


@pytest.mark.usefixtures("memory")
def test_seeded_sampling_is_the_same_alone_chunked_and_batched(case: ParityCase) -> None:
    drawn = [
        SamplingParams(max_tokens=20, temperature=0.8, seed=5),
        SamplingParams(max_tokens=20, temperature=1.5, top_k=20, seed=6),
        SamplingParams(max_tokens=20, temperature=1.2, top_p=0.9, seed=2**64 - 1),
        SamplingParams(max_tokens=20, temperature=0.8, seed=5),
    ]
    prompts = [case.prompts[i].prompt for i in (4, 5, 3, 4)]

    def runs() -> list[SequenceRun]:
        blocks = ShuffledBlocks()
        return [
            SequenceRun(prompt, blocks.allocate_blocks(len(prompt) + 20), params, choice)
            for prompt, params, choice in zip(prompts, drawn, (0, 0, 0, 1), strict=True)
        ]

    alone, batched, chunked = runs(), runs(), runs()
    for run in alone:
        run_to_end(case.engine, [run])
    run_to_end(case.engine, batched)
    run_to_end(case.engine, chunked[::-1], (13 for _ in iter(int, 1)))
    answers = [run.output_tokens for run in alone]
    assert (
        answers == [run.output_tokens for run in batched] == [run.output_tokens for run in chunked]
    )
    assert answers[0] != answers[3]  # the same request's second choice
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3"])
def test_bf16_error_is_no_larger_than_that_of_transformers(
    family: FamilyName, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "models"
    folder = build_model(family, root, dtype="bfloat16")
    half = load_reference_model(folder)
    exact = load_reference_model(folder).float()
    config = load_model_config(folder)
    kernels = kernels_for(CPU)
    model = Transformer(config, load_weights(folder, config, torch.bfloat16, CPU, kernels), kernels)
    shape = (16, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    cache = PagedCache.from_arena(torch.zeros(shape, dtype=torch.bfloat16))
    planner = ForwardBatchBuilder(kernels, cache, config.windows)
    prompt = tuple(
        torch.randint(0, 512, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    )
    mine, theirs = [], []
    blocks = tuple(map(BlockIndex, range(10)))
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        expected, other = exact(ids).logits[0], half(ids).logits[0].float()
        for start, end in ((0, 90), *((i, i + 1) for i in range(90, 150))):
            slice_ = SequenceSlice(
                SequenceId(1), prompt[start:end], start, blocks, SampleSpec(GREEDY, 0, end)
            )
            hidden = model.forward(planner.build_batch(StepBatch((slice_,))), cache)
            assert hidden is not None
            logits = model.compute_logits(hidden)
            mine.append(float((logits[0].float() - expected[end - 1]).square().mean()))
            theirs.append(float((other[end - 1] - expected[end - 1]).square().mean()))
    assert sum(mine) < 1.5 * sum(theirs)


@pytest.mark.usefixtures("memory")
def test_a_slice_that_its_blocks_cannot_hold_is_refused(case: ParityCase) -> None:
    for tokens, blocks in (((1,) * 17, 1), ((), 1)):
        slice_ = SequenceSlice(
            SequenceId(1), tokens, 0, [BlockIndex(n) for n in range(blocks)], None
        )
        with pytest.raises(ValueError, match="sequence 1"):
            case.engine.run(StepBatch((slice_,)))


def test_an_arena_of_another_size_or_read_only_is_refused(case: ParityCase) -> None:
    size = case.engine.layout.block_bytes
    with pytest.raises(ValueError, match="2 blocks need"):
        case.engine.bind_cache(memoryview(bytearray(size)), 2)
    with pytest.raises(ValueError, match="read-only: True"):
        case.engine.bind_cache(memoryview(bytes(size)), 1)
