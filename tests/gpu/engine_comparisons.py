"""What an engine computes in small steps, for comparisons between engines and with transformers."""

import itertools
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.errors import NodeFailed
from baton.types import BlockIndex, SamplingParams, TokenLogprobs
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
    TokenCounts,
)
from tests.layer_callbacks import FunctionCallback
from tests.sequence_runs import SequenceRun, ShuffledBlocks, run_step, run_to_end
from tests.token_masks import FixedTokenMask

NUM_BLOCKS = 64
_CHUNK = 32  # prompt tokens of a step before a hand-off
_CHUNKS = (5, 33, 97)


def bind_engine(engine: Engine) -> mmap.mmap:
    """Bind an arena full of NaN, also in device memory."""
    memory = mmap.mmap(-1, NUM_BLOCKS * engine.layout.block_bytes)
    memory[:] = b"\xff" * len(memory)
    engine.bind_cache(memoryview(memory), NUM_BLOCKS)
    engine.load_blocks([BlockIndex(block) for block in range(NUM_BLOCKS)])
    engine.run(StepBatch(()))
    return memory


def _make_run(prompt: Sequence[int], count: int, blocks: ShuffledBlocks) -> SequenceRun:
    params = SamplingParams(max_tokens=count, temperature=0.0)
    return SequenceRun(tuple(prompt), blocks.allocate_blocks(len(prompt) + count), params)


def generate_in_chunks(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """Greedy tokens of all prompts, in steps that mix decode slices and prefill chunks."""
    blocks = ShuffledBlocks(NUM_BLOCKS)
    runs = [_make_run(prompt, count, blocks) for prompt in prompts]
    run_to_end(engine, runs, itertools.cycle(_CHUNKS))
    return [run.output_tokens for run in runs]


def generate_staggered(
    engine: Engine, prompts: Sequence[Sequence[int]], temperature: float = 0.9, growth: int = 4
) -> list[list[int]]:
    """Tokens of all prompts; a sequence joins every second step, and they end one by one.

    Each generates `growth` tokens more than the one before it.
    """
    blocks = ShuffledBlocks(NUM_BLOCKS)
    longest = growth * (len(prompts) + 1)
    runs = [
        SequenceRun(
            tuple(prompt),
            blocks.allocate_blocks(len(prompt) + longest),
            SamplingParams(growth * (place + 2), temperature, top_p=0.95, seed=place),
        )
        for place, prompt in enumerate(prompts)
    ]
    num_steps = 0
    while running := [
        run for run in runs[: 1 + num_steps // 2] if len(run.output_tokens) < run.params.max_tokens
    ]:
        run_step(engine, running, [None] * len(running))
        num_steps += 1
    return [run.output_tokens for run in runs]


def generate_in_a_copied_block(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens behind a full prefix hit: all but the last token are in a copied block.

    The prompt has the length of a block."""
    blocks = ShuffledBlocks(NUM_BLOCKS)
    whole = _make_run(prompt, count, blocks)
    run_step(engine, [whole], [None])
    hit = _make_run(prompt, count, blocks)
    hit.computed_tokens = len(prompt) - 1
    slice_ = hit.next_slice()
    copies = ((whole.blocks[0], hit.blocks[0]),)
    [made] = engine.run(StepBatch((slice_,), block_copies=copies))
    hit.apply_result(slice_, made)
    run_to_end(engine, [hit])
    return hit.output_tokens


def generate_after_handoff(
    prefill: Engine, decode: Engine, prompt: Sequence[int], count: int
) -> list[int]:
    """Greedy tokens: the first of `prefill`, the others of `decode`, from what was announced.

    Layers are copied between the host arenas of both when they are announced.
    """
    source, target = bind_engine(prefill), bind_engine(decode)
    run = _make_run(prompt, count, ShuffledBlocks(NUM_BLOCKS, seed=0))
    theirs = ShuffledBlocks(NUM_BLOCKS, seed=1).allocate_blocks(len(prompt) + count)
    read, written = _view_slabs(prefill, source), _view_slabs(decode, target)
    announced: list[int] = []

    def copy_layer(layer: int) -> None:
        written[theirs, layer] = read[run.blocks, layer]
        announced.append(layer)

    num_steps = 0
    while not run.output_tokens:
        run_step(prefill, [run], [_CHUNK], FunctionCallback(copy_layer, run.blocks))
        num_steps += 1
    assert announced == list(range(prefill.layout.num_layers)) * num_steps
    decode.load_blocks(theirs)
    run.blocks = theirs
    run_to_end(decode, [run])
    return run.output_tokens


def saves_what_it_announces(make_engine: Callable[[], Engine], prompt: Sequence[int]) -> bool:
    """Whether `save_blocks` leaves the bytes in the host arena that a step with a callback does.

    Blocks that are not saved stay as they are, in both cases.
    """
    blocks = ShuffledBlocks(NUM_BLOCKS)
    table = blocks.allocate_blocks(len(prompt))
    arenas = []
    for announces in (False, True):
        engine = make_engine()
        memory = bind_engine(engine)
        others = _make_run(prompt[:3], 1, ShuffledBlocks(NUM_BLOCKS, seed=1))
        others.blocks = [b for b in map(BlockIndex, range(NUM_BLOCKS)) if b not in table]
        run = SequenceRun(tuple(prompt), table, SamplingParams(max_tokens=1, temperature=0.0))
        callback = FunctionCallback(lambda _: None, table) if announces else None
        run_step(engine, [others, run], [None, None], callback)
        if not announces:
            assert not np.any(_view_slabs(engine, memory) != 0xFF), "steps alone write nothing"
            engine.save_blocks(table).result()
        arenas.append(_view_slabs(engine, memory).copy())
    saved, announced = arenas
    rest = [block for block in range(NUM_BLOCKS) if block not in table]
    return np.array_equal(saved, announced) and not np.any(saved[rest] != 0xFF)


def _view_slabs(engine: Engine, memory: mmap.mmap) -> npt.NDArray[np.uint8]:
    """The bytes of the KV arena, [blocks, layers, bytes of one layer of a block]."""
    return np.frombuffer(memory, np.uint8).reshape(NUM_BLOCKS, engine.layout.num_layers, -1)


def run_special_rows(engine: Engine) -> tuple[list[int], list[float]]:
    """Token ids and logprobs of steps with biased, penalised, masked and scored rows beside plain
    ones."""
    blocks = ShuffledBlocks(NUM_BLOCKS)
    counts = TokenCounts((3, 4, 5))
    counts.add_output_tokens((9, 9, 11))
    plain = SamplingParams(1, temperature=0.0)
    biased = SamplingParams(1, temperature=0.0, logprobs=4, logit_bias=((7, 5.0), (8, -3.0)))
    drawn = SamplingParams(
        1, temperature=1.1, seed=5, top_k=30, top_p=0.9, repetition_penalty=1.3, logprobs=0
    )
    drawn_freely = SamplingParams(1, temperature=1.0, seed=2)

    def make_slice(
        number: int, length: int, spec: SampleSpec | None, top_logprobs: int | None = None
    ) -> SequenceSlice:
        tokens = tuple((number * 101 + place * place * 7) % 512 for place in range(length + 1))
        scored = None if top_logprobs is None else PromptLogprobsSpec(tokens[1:], top_logprobs)
        table = blocks.allocate_blocks(length)
        return SequenceSlice(SequenceId(number), tokens[:-1], 0, table, spec, scored)

    steps = (
        (
            make_slice(1, 3, SampleSpec(plain, 0, 3)),
            make_slice(2, 9, SampleSpec(biased, 0, 9)),
            make_slice(3, 1, SampleSpec(drawn, 1, 1, (6,), counts)),
            make_slice(4, 2, None),
        ),
        tuple(
            make_slice(number, 2, SampleSpec(params, 0, 2, mask=mask))
            for number, params, mask in (
                (11, plain, FixedTokenMask((3, 64, 511), 512)),
                (12, plain, None),
                (13, drawn_freely, FixedTokenMask(tuple(range(40, 60)), 512)),
                (14, biased, FixedTokenMask((7, 300), 512)),
            )
        ),
        (
            make_slice(5, 18, SampleSpec(biased, 0, 18), top_logprobs=3),
            make_slice(6, 1, SampleSpec(drawn, 0, 1, (), counts), top_logprobs=0),
            make_slice(7, 4, None, top_logprobs=1),
            make_slice(8, 2, SampleSpec(plain, 0, 2)),
        ),
    )
    token_ids: list[int] = []
    logprobs: list[float] = []
    for slices in steps:
        for result in engine.run(StepBatch(slices)):
            token_ids.append(-1 if result.token_id is None else result.token_id)
            scores = [*result.prompt_logprobs, *([result.logprobs] if result.logprobs else [])]
            for score in scores:
                _append_scores(score, token_ids, logprobs)
    return token_ids, logprobs


def _append_scores(score: TokenLogprobs, token_ids: list[int], logprobs: list[float]) -> None:
    logprobs.append(score.logprob)
    for token, logprob in score.top_logprobs:
        token_ids.append(token)
        logprobs.append(logprob)


def reports_damaged_cache(engine: Engine) -> bool:
    """Whether a step that reads NaN raises NodeFailed."""
    table = [BlockIndex(0), BlockIndex(1)]
    spec = SampleSpec(SamplingParams(1, temperature=0.0), 0, 17)
    try:
        engine.run(StepBatch((SequenceSlice(SequenceId(1), (5,), 16, table, spec),)))
    except NodeFailed:
        return True
    return False
