"""Which steps are measured at start, on a machine whose steps take what a cost says."""

from collections.abc import Callable

import pytest

from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.scheduling.step_measurement import (
    MAX_MEASURING_SECONDS,
    MeasuredStep,
    measure_steps,
)
from node_engine.core.step.step_batch import SequenceId, SequenceSlice, StepBatch

BLOCK = 16


def machine(step_seconds: float, tokens_per_second: float) -> Callable[[StepBatch], float]:
    """A step takes a fixed time, and each token more."""
    return lambda batch: step_seconds + batch.num_tokens / tokens_per_second


def measure(
    time_step: Callable[[StepBatch], float | None],
    num_blocks: int = 1000,
    max_model_len: int = 4096,
) -> list[MeasuredStep]:
    return measure_steps(
        time_step,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_batched_tokens=512,
    )


def lengths(measured: list[MeasuredStep]) -> list[int]:
    return [step.batch.num_tokens for step in measured]


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "expected"),
    [
        (1000, 4096, [1, 1, 64, 128, 256, 512]),
        (10, 4096, [1, 1, 64, 128, 160]),
        (1000, 100, [1, 1, 64, 99]),
        (1, 4096, [1, 1, 16]),
        (0, 4096, []),
        (1000, 1, []),
    ],
)
def test_steps_fit_the_cache_and_the_context(
    num_blocks: int, max_model_len: int, expected: list[int]
) -> None:
    assert lengths(measure(machine(1e-3, 1e6), num_blocks, max_model_len)) == expected


def test_no_step_is_tried_after_one_that_cannot_be_computed() -> None:
    tried: list[int] = []

    def time_step(batch: StepBatch) -> float | None:
        tried.append(batch.num_tokens)
        return 1e-3 if batch.num_tokens <= 64 else None

    assert lengths(measure(time_step)) == [1, 1, 64]
    assert tried == [1, 1, 64, 128]


@pytest.mark.parametrize("tokens_per_second", [100.0, 400.0, 2000.0, 1e5])
def test_measuring_ends_in_time(tokens_per_second: float) -> None:
    """One chunk is measured on the slowest machine, and no further one that takes too long."""
    measured = measure(machine(0.01, tokens_per_second))
    assert lengths(measured)[:3] == [1, 1, 64]
    if len(measured) > 3:
        assert sum(step.seconds for step in measured) <= MAX_MEASURING_SECONDS


@pytest.mark.parametrize("tokens_per_second", [100.0, 400.0, 2000.0])
@pytest.mark.parametrize("num_running", [1, 16])
def test_the_first_chunk_beside_running_sequences_keeps_the_bound(
    tokens_per_second: float, num_running: int
) -> None:
    """The budget has seen nothing but the measured steps of this machine."""
    time_step, bound = machine(0.03, tokens_per_second), 0.25
    budget = PrefillTokenBudget(BLOCK)
    budget.max_step_seconds = bound
    for step in measure(time_step):
        budget.observe_step(*step)
    tokens = budget.compute_token_limit(num_running, num_running * 100, 0, 512).tokens
    assert tokens is not None
    slices = [
        *(SequenceSlice(SequenceId(n), (1,), 99, (), None) for n in range(1, num_running + 1)),
        SequenceSlice(SequenceId(0), (1,) * tokens, 0, (), None),
    ]
    assert time_step(StepBatch(tuple(slices))) <= bound or tokens == BLOCK
    assert tokens >= max(BLOCK, 0.3 * bound * tokens_per_second // BLOCK * BLOCK), (
        "most of the bound is used"
    )
