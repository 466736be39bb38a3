"""Prompts computed beside running sequences: how much of a step they get, on a clock that only the
costs move."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.limits import LOCAL_PREFILL_BURST_STEPS as BURST
from baton.types import SamplingParams
from node_engine.core.scheduling.prefill_token_budget import PrefillTokenBudget
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.paced.costs import PacedCosts
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    SteppedNode,
    expected_tokens,
    make_work,
    unshared_prompt,
)

COSTS = PacedCosts(
    prefill_us_per_token=50.0, prefill_us_per_cached_token=0.0, decode_base_us=5000.0
)
DRAWN = SampleSpec(SamplingParams(8), 0, 0)


def make_batch(num_running: int, context_tokens: int, prompts: list[tuple[int, int]]) -> StepBatch:
    """`prompts`: tokens before, and in the step."""
    ids = map(SequenceId, count())
    slices = [SequenceSlice(next(ids), (1,), context_tokens, (), DRAWN) for _ in range(num_running)]
    slices += [
        SequenceSlice(next(ids), (1,) * length, computed_tokens, (), None)
        for computed_tokens, length in prompts
    ]
    return StepBatch(tuple(slices))


class TimedNode:
    """An allowance and the steps that it leads to, which take what `costs` say."""

    def __init__(self, share: float | None, num_running: int, costs: PacedCosts = COSTS) -> None:
        self.prefill_budget = PrefillTokenBudget(BLOCK)
        self.prefill_budget.prefill_step_share = share
        self.costs = costs
        self.num_running, self.context_tokens = num_running, 20
        for _ in range(20):
            self.step(0, 0)
        self.decode_step_seconds = self.step(0, 0)

    def step(self, computed_tokens: int, length: int) -> float:
        self.context_tokens += 1
        batch = make_batch(
            self.num_running, self.context_tokens, [(computed_tokens, length)] if length else []
        )
        seconds = self.costs.compute_step_seconds(batch)
        self.prefill_budget.observe_step(batch, seconds)
        return seconds

    def compute_prompt(self, tokens: int) -> list[tuple[float, int]]:
        """A prompt: seconds and tokens of each of its steps."""
        computed_tokens = 0
        steps: list[tuple[float, int]] = []
        while computed_tokens < tokens:
            granted = self.prefill_budget.compute_token_limit(
                self.num_running,
                self.num_running * self.context_tokens,
                computed_tokens,
                tokens - computed_tokens,
            ).tokens
            length = min(
                512, tokens - computed_tokens, 512 if granted is None else granted // BLOCK * BLOCK
            )
            steps.append((self.step(computed_tokens, length), length))
            computed_tokens += length
            assert len(steps) < 20_000, "starved"
        return steps

    def compute_slowdown(self, steps: list[tuple[float, int]]) -> float:
        return sum(seconds for seconds, _ in steps) / len(steps) / self.decode_step_seconds


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("num_running", [1, 8])
def test_running_sequences_keep_their_pace(share: float, num_running: int) -> None:
    node = TimedNode(share, num_running)
    node.compute_prompt(600)  # what prompts cost is learned from it
    steps = node.compute_prompt(1600)
    at_once = BURST * share / len(steps)
    slowdown = node.compute_slowdown(steps)
    assert 1.0 + 0.8 * share <= slowdown <= (1.0 + share) * 1.05 + at_once, (
        "what is allowed is used, and no more"
    )
    block = BLOCK * COSTS.prefill_us_per_token * 1e-6
    saved = max(BURST * share * node.decode_step_seconds, block)
    assert max(seconds for seconds, _ in steps) <= 1.05 * (
        (1.0 + share) * node.decode_step_seconds + saved
    )


def test_a_short_prompt_is_computed_at_once_and_the_next_one_is_not() -> None:
    node = TimedNode(0.5, 4)
    node.compute_prompt(600)
    for _ in range(2 * BURST):
        node.step(0, 0)
    assert len(node.compute_prompt(256)) == 1, "12.8 ms of computing, and 20 were saved up"
    node.compute_prompt(1600)
    assert len(node.compute_prompt(256)) > 3


def test_no_limit_without_a_share() -> None:
    assert {length for _, length in TimedNode(None, 2).compute_prompt(1024)} == {512}


def test_no_limit_without_running_sequences() -> None:
    token_budget = PrefillTokenBudget(BLOCK)
    token_budget.prefill_step_share = 0.1
    assert token_budget.compute_token_limit(0, 0, 0, 500).tokens is None


def test_small_share_saves_credit_for_a_whole_block() -> None:
    node = TimedNode(
        0.5,
        1,
        PacedCosts(
            prefill_us_per_token=1000.0, prefill_us_per_cached_token=0.0, decode_base_us=5000.0
        ),
    )
    node.compute_prompt(160)
    steps = node.compute_prompt(160)
    assert {length for _, length in steps} == {0, BLOCK}, (
        "16 ms of computing for 2.5 ms of each step"
    )
    assert 5 <= len(steps) / 10 <= 8


def test_the_end_of_a_long_context_is_reached() -> None:
    """What a block costs grows along a prompt, and so does what may be saved up for it."""
    attention = PacedCosts(
        prefill_us_per_token=100.0, prefill_us_per_cached_token=0.5, decode_base_us=1000.0
    )
    TimedNode(0.2, 1, attention).compute_prompt(4096)


def test_a_share_may_change_at_any_time() -> None:
    node = TimedNode(0.1, 1)
    node.compute_prompt(600)
    few = len(node.compute_prompt(600))
    node.prefill_budget.prefill_step_share = 1.0
    assert len(node.compute_prompt(600)) < few / 3


def test_compute_time_share() -> None:
    node = TimedNode(0.5, 4)
    node.compute_prompt(600)
    added = 96 * 50.0 / (96 * 50.0 + 5000.0 + 4 * 20.0)
    assert node.prefill_budget.compute_time_share(
        make_batch(4, 50, [(0, 64), (0, 32)]), 64
    ) == pytest.approx(added * 2 / 3, rel=0.1)
    assert node.prefill_budget.compute_time_share(
        make_batch(0, 0, [(0, 64), (0, 32)]), 32
    ) == pytest.approx(1 / 3)
    assert node.prefill_budget.compute_time_share(make_batch(3, 50, []), 1) == pytest.approx(
        1 / 3
    ), "all but the last token was cached"


@settings(max_examples=60)
@given(
    st.floats(0.01, 4.0),
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 300), st.floats(1e-6, 10.0)),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 4000),
)
def test_no_prompt_is_starved_whatever_steps_took(
    share: float, steps: list[tuple[int, int, float]], computed_tokens: int
) -> None:
    token_budget = PrefillTokenBudget(BLOCK)
    token_budget.prefill_step_share = share
    for num_running, new, seconds in steps:
        token_budget.observe_step(
            make_batch(num_running, 100, [(computed_tokens, new)] if new > 1 else []), seconds
        )
    plain, earned, block = make_batch(4, 100, []), 0.0, 0.0
    for _ in range(64):
        granted = token_budget.compute_token_limit(4, 400, computed_tokens, 500).tokens
        if granted is None or granted >= BLOCK:
            return
        assert granted >= 0
        block = (
            4.0
            * BLOCK
            * sum(
                map(
                    float.__mul__,
                    token_budget._prefill_fit.coefficients,
                    (1 / 1024, computed_tokens / 1024**2),
                )
            )
        )
        took = max(0.01, block / share)  # a step long enough to pay a debt and a block
        token_budget.observe_step(plain, took)
        earned += share * took
    raise AssertionError(f"{earned} s were earned, and a block costs about {block / 4}")


@given(st.floats(0.01, 4.0), st.integers(1, 64), st.integers(0, 4000))
def test_token_limits_come_in_few_sizes(
    share: float, num_running: int, computed_tokens: int
) -> None:
    token_budget = PrefillTokenBudget(BLOCK)
    token_budget.prefill_step_share = share
    granted = token_budget.compute_token_limit(
        num_running, num_running * 100, computed_tokens, 500
    ).tokens
    assert granted is not None
    blocks, rest = divmod(granted, BLOCK)
    assert rest == 0
    assert blocks.bit_count() <= 3
    assert blocks >> max(0, blocks.bit_length() - 3) << max(0, blocks.bit_length() - 3) == blocks


def test_scheduler_keeps_the_budget_and_chunking_changes_no_token() -> None:
    works = [make_work(name, unshared_prompt(40 + 30 * name, name), 6) for name in range(4)]
    cuts = []
    for share in (None, 0.02, 0.08):
        node = SteppedNode(num_blocks=96, max_batched_tokens=512)
        node.scheduler.prefill_budget.prefill_step_share = share
        running = make_work("resident", unshared_prompt(20, 90), 400)
        node.add_work(running)
        begun = 0
        while not all(len(node.emitted_tokens(work)) == 6 for work in works):
            batch = node.step()
            assert batch is not None
            node.scheduler.prefill_budget.observe_step(batch, COSTS.compute_step_seconds(batch))
            if begun < len(works) and len(node.emitted_tokens(running)) > 16 * (begun + 1):
                node.add_work(works[begun])
                begun += 1
        assert [node.emitted_tokens(work) for work in works] == [
            expected_tokens(work) for work in works
        ]
        cuts.append(
            sum(any(len(slice_.token_ids) > 1 for slice_ in each.slices) for each in node.batches)
        )
    assert cuts[0] == 5, "each prompt in one step"
    assert cuts[0] < cuts[2] < cuts[1]


@pytest.mark.parametrize("max_step_seconds", [0.002, 0.012, 0.02])
@pytest.mark.parametrize("share", [None, 4.0])
def test_steps_keep_their_bound(max_step_seconds: float, share: float | None) -> None:
    """A step that decodes for 5 ms takes a chunk that fits the bound, or one block."""
    node = TimedNode(share, 1)
    node.compute_prompt(600)  # what prompts cost is learned from it
    node.prefill_budget.max_step_seconds = max_step_seconds
    steps = node.compute_prompt(1600)
    block = BLOCK * COSTS.prefill_us_per_token * 1e-6
    bound = max(max_step_seconds, node.decode_step_seconds + block)
    assert max(seconds for seconds, _ in steps) <= 1.05 * bound
    assert min(length for _, length in steps) >= BLOCK, "a prompt advances in every step"


def test_a_share_may_be_stricter_than_the_bound() -> None:
    node = TimedNode(0.1, 1)
    node.compute_prompt(600)
    node.prefill_budget.max_step_seconds = 1.0
    steps = node.compute_prompt(1600)
    assert node.compute_slowdown(steps) <= 1.2
