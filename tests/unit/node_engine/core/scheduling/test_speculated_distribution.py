"""10**5 sampled tokens with speculative decoding, beside those without and their distribution.

A Markov chain stands in for the model: the logits after a token depend on that token alone, so that
the distribution of every transition is known exactly.
"""

import math
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from baton.kv.blocks import KVLayout, root_hash
from baton.process.clock import FakeClock
from baton.types import AttemptKey, AttemptSpec, Request, RequestId, SamplingParams
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import TokenEmitted
from node_engine.core.speculation.model_drafter import ModelDrafter
from node_engine.core.step.step_batch import (
    SampleSpec,
    SliceResult,
    StepBatch,
    gather_slice_results,
    list_sampled_rows,
)
from node_engine.model.sampling.philox import philox4x32
from node_engine.model.sampling.sampler import draw_token

Ints = npt.NDArray[np.int64]
VOCAB = 8
SEED = 11
NUM_SEQUENCES, TOKENS_EACH = 50, 2000
PARAMS = SamplingParams(TOKENS_EACH, temperature=1.0, seed=SEED)
LOGITS = np.random.default_rng(0).normal(0.0, 0.3, (VOCAB, VOCAB)).astype(np.float32)
LOGITS[np.arange(VOCAB), (3 * np.arange(VOCAB) + 1) % VOCAB] += 2.5  # so that drafts are likely
DRAFT_LOGITS = LOGITS + np.random.default_rng(1).normal(0.0, 0.7, LOGITS.shape).astype(np.float32)
BLOCK_SIZE = 64


def draw_tokens(
    previous: Ints, positions: Ints, choices: Ints, all_logits: npt.NDArray[np.float32] = LOGITS
) -> Ints:
    """`draw_token` of many rows at once."""
    counters = np.tile(np.arange(VOCAB // 4, dtype=np.uint64), len(previous))
    per_row = VOCAB // 4
    words = np.stack(
        philox4x32(
            (
                counters,
                np.repeat(positions.astype(np.uint64), per_row),
                np.repeat(choices.astype(np.uint64), per_row),
                np.zeros(len(counters), np.uint64),
            ),
            (SEED, 0),
        ),
        -1,
    ).reshape(len(previous), VOCAB)
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    noise = -np.log(-np.log1p(-np.minimum(uniform, np.float32(1.0 - 2.0**-24))))
    logits = all_logits[previous]
    scaled = logits - logits.max(-1, keepdims=True)
    drawn: Ints = np.argmax(scaled + noise, -1)
    return drawn


def run_batch(batch: StepBatch, all_logits: npt.NDArray[np.float32] = LOGITS) -> list[SliceResult]:
    rows, specs = list_sampled_rows(batch.slices)
    tokens = np.array([token for slice_ in batch.slices for token in slice_.token_ids])
    drawn = draw_tokens(
        tokens[rows],
        np.array([spec.position for spec in specs]),
        np.array([spec.choice_index for spec in specs]),
        all_logits,
    )
    return gather_slice_results(batch.slices, map(SliceResult, drawn.tolist()))


def make_drafter() -> ModelDrafter:
    """A draft model with another distribution."""
    return ModelDrafter(
        partial(run_batch, all_logits=DRAFT_LOGITS),
        num_blocks=NUM_SEQUENCES * (TOKENS_EACH // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_model_len=TOKENS_EACH + 10,
        vocab_size=VOCAB,
        clock=FakeClock(),
    )


def run_speculated(drafter: ModelDrafter | None) -> tuple[Ints, Scheduler, int]:
    """The outputs of all choices, [sequences, tokens], and how many steps they took."""
    pool = BlockPool(NUM_SEQUENCES * (TOKENS_EACH // BLOCK_SIZE + 2), BLOCK_SIZE, FakeClock())
    limits = SchedulerLimits(NUM_SEQUENCES, 1024, TOKENS_EACH + 10, max_draft_tokens=4)
    scheduler = Scheduler(pool, limits)
    if drafter is not None:
        scheduler.speculator.use_draft_model(drafter)
    root = root_hash(b"", KVLayout(1, 1, 4, BLOCK_SIZE, "float32"), b"")
    for choice in range(NUM_SEQUENCES):
        key = AttemptKey(RequestId("r"), 0, choice)
        request = Request(key.request_id, (choice % VOCAB,), PARAMS, 60.0, choice_index=choice)
        scheduler.add_sequence(AttemptSpec(key, request), root)
    outputs: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
    num_steps = 0
    while (batch := scheduler.schedule_step().batch) is not None:
        num_steps += 1
        for outcome in scheduler.update_from_results(batch, run_batch(batch)):
            if isinstance(outcome, TokenEmitted):
                outputs[outcome.event.key.choice_index].append(outcome.event.token_id)
    return np.array(outputs), scheduler, num_steps


def run_chain() -> Ints:
    """The same without a scheduler and without drafts, one token after the other."""
    choices = np.arange(NUM_SEQUENCES)
    tokens = choices % VOCAB
    outputs = []
    for position in range(1, TOKENS_EACH + 1):
        tokens = draw_tokens(tokens, np.full(NUM_SEQUENCES, position), choices)
        outputs.append(tokens)
    return np.stack(outputs, 1)


def test_many_rows_are_drawn_as_one_is() -> None:
    previous, positions = np.arange(VOCAB), np.arange(100, 100 + VOCAB)
    drawn = draw_tokens(previous, positions, previous)
    assert drawn.tolist() == [
        draw_token(LOGITS[row], SampleSpec(PARAMS, row, 100 + row)) for row in range(VOCAB)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("has_draft_model", [False, True])
def test_speculated_tokens_have_the_distribution_of_the_model(has_draft_model: bool) -> None:
    drafter = make_drafter() if has_draft_model else None
    outputs, scheduler, num_steps = run_speculated(drafter)
    assert outputs.size == 10**5
    assert num_steps < 0.8 * TOKENS_EACH, "drafts were accepted"
    counters = scheduler.speculator.counters()
    assert counters['baton_draft_tokens_total{result="rejected"}'] > 10**4
    assert (outputs == run_chain()).all()
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (outputs[:, :-1].ravel(), outputs[:, 1:].ravel()), 1)
    weights = np.exp(LOGITS.astype(np.float64))
    expected = counts.sum(1, keepdims=True) * weights / weights.sum(1, keepdims=True)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = VOCAB * (VOCAB - 1)
    # The 99.9% point, by Wilson and Hilferty: p is above 0.001 below it.
    spread = 2.0 / (9.0 * freedom)
    assert chi_square < freedom * (1.0 - spread + 3.09 * math.sqrt(spread)) ** 3
