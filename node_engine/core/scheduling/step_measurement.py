"""What steps take on this machine, measured before the first request.

The steps are a few decode steps and prompt chunks of growing length, in an empty cache. From them
the cost model of PrefillTokenBudget learns what the machine is, so that its bounds hold from the
first step on, and a node chooses the length of its chunks: the shortest that computes prompts at
nearly the best rate. Shorter chunks let short prompts overtake long ones sooner.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch

MAX_MEASURING_SECONDS = 0.4  # no further step begins that may exceed it
BEST_RATE_SHARE = 0.9  # of the best rate, which a chunk has to reach
_FIRST_CHUNK_TOKENS = 64
_NUM_DECODE_STEPS = 2
_GREEDY = SamplingParams(1, temperature=0.0)


class MeasuredStep(NamedTuple):
    """A step and how long it took."""

    batch: StepBatch
    seconds: float


def measure_steps(
    time_step: Callable[[StepBatch], float | None],
    *,
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_batched_tokens: int,
) -> list[MeasuredStep]:
    """Measure decode steps and chunks; `time_step` computes a step and returns its seconds.

    It returns None for a step that it cannot compute, and no longer one is tried then.

    Chunks double from _FIRST_CHUNK_TOKENS to `max_batched_tokens`, or to what fits the cache and
    the longest context, while a step that takes twice as long as the one before leaves the total
    within MAX_MEASURING_SECONDS.
    """
    table = [BlockIndex(block) for block in range(num_blocks)]
    longest = min(max_batched_tokens, num_blocks * block_size, max_model_len - 1)
    measured: list[MeasuredStep] = []
    total = 0.0
    for length in _iter_step_lengths(longest):
        is_expected_too_long = measured and total + 2 * measured[-1].seconds > MAX_MEASURING_SECONDS
        if is_expected_too_long and len(measured) > _NUM_DECODE_STEPS:
            break
        batch = StepBatch((_make_slice(length, table),))
        seconds = time_step(batch)
        if seconds is None:
            break
        measured.append(MeasuredStep(batch, seconds))
        total += seconds
    return measured


def choose_chunk_tokens(measured: Sequence[MeasuredStep]) -> int | None:
    """The fewest prompt tokens of a step at nearly the best measured rate; None without chunks."""
    least = BEST_RATE_SHARE * _find_best_rate(measured)
    lengths = (
        step.batch.num_tokens
        for step in measured
        if step.batch.num_tokens > 1 and step.batch.num_tokens >= least * step.seconds > 0.0
    )
    return min(lengths, default=None)


def _find_best_rate(measured: Sequence[MeasuredStep]) -> float:
    """Prompt tokens of a second; 0.0 without chunks."""
    rates = [
        step.batch.num_tokens / step.seconds
        for step in measured
        if step.batch.num_tokens > 1 and step.seconds > 0.0
    ]
    return max(rates, default=0.0)


def _iter_step_lengths(longest: int) -> Iterator[int]:
    if longest < 1:
        return
    yield from (1,) * _NUM_DECODE_STEPS
    length = _FIRST_CHUNK_TOKENS
    while length < longest:
        yield length
        length *= 2
    if longest > 1:
        yield longest


def _make_slice(length: int, table: list[BlockIndex]) -> SequenceSlice:
    return SequenceSlice(
        SequenceId(0), (0,) * length, 0, table, SampleSpec(_GREEDY, 0, position=length)
    )
