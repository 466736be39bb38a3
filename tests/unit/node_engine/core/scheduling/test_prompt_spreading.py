"""Prompts that are spread over steps which wait for the weights.

The machine reads and computes at once: a step takes as long as the longer of both.
"""

import pytest

from node_engine.core.scheduling.prefill_token_budget import (
    MAX_SPREAD_RUN,
    SPREAD_STEPS,
    PrefillTokenBudget,
)
from node_engine.core.scheduling.step_measurement import find_ridge_tokens, measure_steps
from node_engine.core.step.step_batch import SequenceId, SequenceSlice, StepBatch
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    SteppedNode,
    expected_tokens,
    make_work,
    unshared_prompt,
)

READ_SECONDS, TOKENS_PER_SECOND = 0.03, 500.0
RIDGE = 15  # tokens
BOUND = 0.25  # seconds


def compute_seconds(batch: StepBatch) -> float:
    return max(READ_SECONDS, batch.num_tokens / TOKENS_PER_SECOND)


def make_batch(num_running: int, chunk: int = 0) -> StepBatch:
    slices = [SequenceSlice(SequenceId(n), (1,), 99, (), None) for n in range(1, num_running + 1)]
    if chunk:
        slices.append(SequenceSlice(SequenceId(0), (1,) * chunk, 0, (), None))
    return StepBatch(tuple(slices))


def use_measured_steps(budget: PrefillTokenBudget) -> None:
    """As a node does it at its start."""
    measured = measure_steps(
        compute_seconds,
        block_size=BLOCK,
        num_blocks=1000,
        max_model_len=4096,
        max_batched_tokens=512,
    )
    budget.ridge_tokens = find_ridge_tokens(measured)
    for step in measured:
        budget.observe_step(*step)


def make_budget() -> PrefillTokenBudget:
    budget = PrefillTokenBudget(BLOCK)
    budget.max_step_seconds = BOUND
    use_measured_steps(budget)
    assert budget.ridge_tokens == RIDGE
    return budget


def limit_tokens(budget: PrefillTokenBudget, num_running: int, waiting_tokens: int) -> int:
    limit = budget.compute_token_limit(num_running, 100 * num_running, 0, waiting_tokens)
    assert limit is not None
    return limit


def test_a_short_prompt_takes_what_steps_leave_idle() -> None:
    budget = make_budget()
    assert limit_tokens(budget, 4, 128) == BLOCK
    assert limit_tokens(budget, 1, 128) == BLOCK
    budget.ridge_tokens = 100
    assert limit_tokens(budget, 4, 128) == 96


def test_many_waiting_tokens_are_computed_in_so_many_steps() -> None:
    budget = make_budget()
    assert limit_tokens(budget, 4, SPREAD_STEPS * 3 * BLOCK) == 3 * BLOCK
    assert limit_tokens(budget, 4, SPREAD_STEPS * 3 * BLOCK + 1) == 4 * BLOCK
    assert compute_seconds(make_batch(4, limit_tokens(budget, 4, 1 << 20))) <= BOUND


@pytest.mark.parametrize("num_running", [RIDGE - 3, RIDGE, 40])
def test_nothing_is_spread_beside_sequences_that_leave_nothing_idle(num_running: int) -> None:
    assert limit_tokens(make_budget(), num_running, 128) >= 0.6 * BOUND * TOKENS_PER_SECOND


def test_prompts_that_keep_coming_are_computed_at_once_until_there_is_none() -> None:
    budget = make_budget()
    budget.observe_step(make_batch(4), READ_SECONDS)
    for _ in range(MAX_SPREAD_RUN):
        assert limit_tokens(budget, 4, 128) == BLOCK
        budget.observe_step(make_batch(4, BLOCK), READ_SECONDS)
    assert limit_tokens(budget, 4, 128) > 4 * BLOCK
    budget.observe_step(make_batch(4), READ_SECONDS)
    assert limit_tokens(budget, 4, 128) == BLOCK


def test_only_the_share_bounds_prompts_if_there_is_one() -> None:
    budget = make_budget()
    budget.prefill_step_share = 4.0
    budget.max_step_seconds = None
    for _ in range(20):
        budget.observe_step(make_batch(4), READ_SECONDS)
    assert limit_tokens(budget, 4, 128) > 2 * BLOCK


def test_what_chunks_cost_is_known_after_many_free_ones() -> None:
    """The next long prompt keeps the bound, and uses it."""
    budget = make_budget()
    for num_running in (1, 4, 8) * 200:
        for batch in (make_batch(num_running), make_batch(num_running, BLOCK)):
            budget.observe_step(batch, compute_seconds(batch))
    for num_running in (1, 4, 8):
        limit = limit_tokens(budget, num_running, 1 << 20)
        assert 0.6 * BOUND <= compute_seconds(make_batch(num_running, limit)) <= 1.05 * BOUND


def serve_clients(num_clients: int, *, spread: bool) -> tuple[float, float]:
    """Serve clients that send one prompt after another, with outputs of different lengths.

    Returns seconds, and those of the longest step beside running sequences.
    """
    node = SteppedNode(num_blocks=400, max_num_seqs=num_clients, max_batched_tokens=512)
    budget = node.scheduler.prefill_budget
    budget.max_step_seconds = BOUND
    use_measured_steps(budget)
    if not spread:
        budget.ridge_tokens = 0
    clients = [
        [
            make_work(f"{client}-{n}", unshared_prompt(128, 7 * client + n), 40 + 8 * client)
            for n in range(4)
        ]
        for client in range(num_clients)
    ]
    works = [work for own in clients for work in own]
    for own in clients:
        node.add_work(own[0])
    total = longest = 0.0
    while any(clients):
        batch = node.step()
        assert batch is not None
        seconds = compute_seconds(batch)
        budget.observe_step(batch, seconds)
        total += seconds
        if any(len(slice_.token_ids) == 1 for slice_ in batch.slices):
            longest = max(longest, seconds)
        for own in clients:
            if own and len(node.emitted_tokens(own[0])) == own[0].request.sampling.max_tokens:
                del own[0]
                if own:
                    node.add_work(own[0])
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)
    return total, longest


def test_spreading_serves_few_clients_sooner_and_in_shorter_steps() -> None:
    at_once, spread = serve_clients(4, spread=False), serve_clients(4, spread=True)
    assert spread[0] < 0.92 * at_once[0]
    assert spread[1] < 0.5 * at_once[1]


def test_spreading_changes_nothing_for_one_client() -> None:
    assert serve_clients(1, spread=True) == pytest.approx(serve_clients(1, spread=False))
