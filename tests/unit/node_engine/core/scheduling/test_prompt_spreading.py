"""Prompts that are spread over steps which wait for the weights.

The machine reads and computes at once: a step takes as long as the longer of both.
"""

from dataclasses import replace

import pytest

from node_engine.core.scheduling.prefill_token_budget import (
    MAX_RIDGE_BLOCKS,
    PrefillTokenBudget,
    PromptTokenLimit,
)
from node_engine.core.scheduling.prompt_spreading import MAX_SPREAD_RUN, SPREAD_STEPS
from node_engine.core.scheduling.step_measurement import measure_steps
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


def use_measured_steps(budget: PrefillTokenBudget, slowed_decode: float = 1.0) -> None:
    """As a node does it at its start; decode steps took `slowed_decode` times as long then."""
    measured = measure_steps(
        lambda batch: compute_seconds(batch) * (slowed_decode if batch.num_tokens == 1 else 1.0),
        block_size=BLOCK,
        num_blocks=1000,
        max_model_len=4096,
        max_batched_tokens=512,
    )
    for step in measured:
        budget.observe_step(*step)


def make_budget(slowed_decode: float = 1.0) -> PrefillTokenBudget:
    budget = PrefillTokenBudget(BLOCK)
    budget.max_step_seconds = BOUND
    budget.spreads_prompts = True
    use_measured_steps(budget, slowed_decode)
    return budget


def limit_tokens(budget: PrefillTokenBudget, num_running: int, waiting_tokens: int) -> int:
    limit = budget.compute_token_limit(num_running, 100 * num_running, 0, waiting_tokens).tokens
    assert limit is not None
    return limit


def test_the_ridge_point_is_what_is_computed_while_the_weights_are_read() -> None:
    budget = make_budget()
    assert budget.ridge_tokens == pytest.approx(RIDGE, abs=1)
    budget.spreads_prompts = False
    assert budget.ridge_tokens == 0


def test_a_ridge_point_that_was_measured_wrong_is_corrected() -> None:
    """Other work slowed the decode steps of the start."""
    budget = make_budget(slowed_decode=8.0)
    assert budget.ridge_tokens == MAX_RIDGE_BLOCKS * BLOCK
    for _ in range(100):
        budget.observe_step(make_batch(4), READ_SECONDS)
    assert budget.ridge_tokens == pytest.approx(RIDGE, abs=2)
    assert limit_tokens(budget, 4, 128) == BLOCK


def test_a_short_prompt_takes_what_steps_leave_idle() -> None:
    budget = make_budget()
    assert limit_tokens(budget, 4, 128) == BLOCK
    assert limit_tokens(budget, 1, 128) == BLOCK
    assert budget.compute_token_limit(4, 400, 0, 128) == PromptTokenLimit(BLOCK, is_spread=True)


def compute_prompt(budget: PrefillTokenBudget, tokens: int) -> list[int]:
    """Chunks of a prompt beside four sequences."""
    chunks: list[int] = []
    while tokens:
        chunk = min(tokens, limit_tokens(budget, 4, tokens))
        batch = make_batch(4, chunk)
        budget.observe_step(batch, compute_seconds(batch))
        chunks.append(chunk)
        tokens -= chunk
    budget.observe_step(make_batch(4), READ_SECONDS)
    return chunks


def test_a_prompt_is_computed_in_even_chunks() -> None:
    budget = make_budget()
    for _ in range(3):
        assert compute_prompt(budget, 128) == [BLOCK] * 8
        assert compute_prompt(budget, SPREAD_STEPS * 3 * BLOCK) == [3 * BLOCK] * SPREAD_STEPS
        chunks = compute_prompt(budget, SPREAD_STEPS * 3 * BLOCK + 1)
        assert len(chunks) <= SPREAD_STEPS
        assert max(chunks) == 4 * BLOCK
    budget.max_step_seconds = 100.0
    assert max(compute_prompt(budget, 4096)) == 256


def test_a_long_prompt_keeps_the_bound_of_steps() -> None:
    budget = make_budget()
    limit = budget.compute_token_limit(4, 400, 0, 1 << 20)
    assert not limit.is_spread
    assert compute_seconds(make_batch(4, limit_tokens(budget, 4, 1 << 20))) <= BOUND


@pytest.mark.parametrize("num_running", [RIDGE - 2, RIDGE, 40])
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
    budget.max_step_seconds = None
    budget.prefill_step_share = 4.0
    plain = PrefillTokenBudget(BLOCK)
    use_measured_steps(plain)
    plain.prefill_step_share = 4.0
    for _ in range(20):
        assert limit_tokens(budget, 4, 128) == limit_tokens(plain, 4, 128)
        for batch in (make_batch(4), make_batch(4, 2 * BLOCK)):
            budget.observe_step(batch, compute_seconds(batch))
            plain.observe_step(batch, compute_seconds(batch))
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


@pytest.mark.parametrize("older_tokens", [128, 240])
def test_a_prompt_of_a_higher_class_overtakes_one_that_is_spread(older_tokens: int) -> None:
    node = SteppedNode(num_blocks=400, max_batched_tokens=512)
    budget = node.scheduler.prefill_budget
    budget.max_step_seconds, budget.spreads_prompts = BOUND, True
    use_measured_steps(budget)
    for n in range(3):
        node.add_work(make_work(f"running-{n}", unshared_prompt(16, n), 60))
    node.step()
    older = make_work("older", unshared_prompt(older_tokens, 5))
    lower_class = replace(older.request.principal, priority_level=1)
    older = replace(older, request=replace(older.request, principal=lower_class))
    node.add_work(older)
    node.step()
    urgent = make_work("urgent", unshared_prompt(48, 6))
    node.add_work(urgent)
    for _ in range(3):
        assert not node.emitted_tokens(urgent)
        node.step()
    assert node.emitted_tokens(urgent)
    node.run()
    for work in (older, urgent):
        assert node.emitted_tokens(work) == expected_tokens(work)


def serve_clients(num_clients: int, *, spread: bool) -> tuple[float, float]:
    """Serve clients that send one prompt after another, with outputs of different lengths.

    Returns seconds, and those of the longest step beside running sequences.
    """
    node = SteppedNode(num_blocks=400, max_num_seqs=num_clients, max_batched_tokens=512)
    budget = node.scheduler.prefill_budget
    budget.max_step_seconds = BOUND
    use_measured_steps(budget)
    budget.spreads_prompts = spread
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
