"""Several choices of one prompt on one node: the prompt is computed once, and nobody sees another's
own tokens."""

from dataclasses import replace

import pytest

from baton.types import AttemptSpec, BlockIndex, TicketId
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.scheduling.capacity import CapacityRefusal
from tests.unit.node_engine.core.stepped_node import (
    BLOCK,
    SteppedNode,
    expected_tokens,
    make_work,
    transfer_kv,
)

PROMPT = tuple((17 * position) % 983 + 1 for position in range(150))
LENGTHS = [2, 15, 16, 17, 18, 31, 32, 33, 40]


def make_choice(work: AttemptSpec, number: int) -> AttemptSpec:
    key = work.key._replace(choice_index=number)
    return AttemptSpec(key, replace(work.request, choice_index=number), work.emitted_token_ids)


def hand_over(prefill: SteppedNode, decode: SteppedNode, work: AttemptSpec) -> None:
    ticket = TicketId(str(work.key))
    prefill.add_work(work, is_prefill_only=True)
    assert not isinstance(
        decode.scheduler.reserve_for_handoff(work, decode.root, ticket), CapacityRefusal
    )
    prefill.run()
    transfer_kv(prefill, decode, work.key, ticket)


@pytest.mark.parametrize("steps", [0, 1, 5, 20, 100], ids=lambda steps: f"after {steps} steps")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_second_choice_computes_one_token(length: int, steps: int) -> None:
    """Whether the first has just been handed over, is writing behind the prompt, has filled the
    prompt's last block, or is over."""
    prefill, decode = SteppedNode(), SteppedNode()
    first = make_work("a", PROMPT[:length], 30)
    hand_over(prefill, decode, first)
    for _ in range(steps):
        decode.step()
    second, third = make_choice(first, 1), make_choice(first, 2)
    for work in (second, third):
        assert decode.scheduler.estimate_admission(work, decode.root).num_missing_tokens == 1
    added = decode.add_work(second)
    decode.step()
    also = decode.add_work(third)
    decode.run()
    assert added.num_cached_tokens == also.num_cached_tokens == length - 1
    for work in (first, second, third):
        assert decode.emitted_tokens(work) == expected_tokens(work)
    for node in (prefill, decode):
        assert node.pool.ownership.count_blocks(BlockState.IN_USE) == 0
        assert sum(node.pool.ownership.count_blocks_by_state().values()) == node.pool.num_blocks


@pytest.mark.parametrize("length", [17, 40])
def test_copy_source_survives_the_end_of_its_owner(length: int) -> None:
    node = SteppedNode()
    first = make_work("a", PROMPT[:length], 30)
    node.add_work(first)
    node.step()
    second = make_choice(first, 1)
    added = node.add_work(second)
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    node.scheduler.cancel_sequence(first.key)
    node.outcomes += node.scheduler.update_from_results(plan.batch, node.engine.run(plan.batch))
    node.pool.check_invariants()
    node.run()
    assert added.num_cached_tokens == length - 1
    assert node.emitted_tokens(second) == expected_tokens(second)
    assert node.pool.ownership.count_blocks(BlockState.IN_USE) == 0


def test_tokens_behind_the_prompt_are_not_found_before_their_block_is_full() -> None:
    node = SteppedNode()
    first = make_work("a", PROMPT[:20], 30)
    sequence = node.add_work(first)
    for _ in range(6):
        node.step()
    so_far = tuple(sequence.token_ids)
    assert len(so_far) == 26
    longer = make_work("b", (*so_far, 5), 4)
    assert node.scheduler.estimate_admission(longer, node.root).num_missing_tokens == 27 - 20
    block = sequence.block_table[1]
    assert node.pool.prefix_index.get_entry(block).token_ids == PROMPT[16:20]
    for _ in range(8):
        node.step()
    assert node.pool.prefix_index.get_entry(block).token_ids == tuple(sequence.token_ids[16:32])
    assert node.scheduler.estimate_admission(longer, node.root).num_missing_tokens == 1


def test_one_copy_of_a_prompts_last_block_is_cached() -> None:
    node = SteppedNode()
    works = [make_choice(make_work("a", PROMPT[:20], 3), number) for number in range(5)]
    for work in works:
        node.add_work(work)
        node.step()
    node.run()
    for work in works:
        assert node.emitted_tokens(work) == expected_tokens(work)
    assert node.pool.ownership.count_blocks(BlockState.CACHED) == 2, (
        "a whole block, and four tokens of the next"
    )


def test_prompts_last_block_is_evictable() -> None:
    node = SteppedNode(num_blocks=4)
    node.add_work(make_work("a", PROMPT[:20], 2))
    node.run()
    assert node.pool.ownership.count_blocks(BlockState.CACHED) == 2
    big = make_work("b", PROMPT[::-1][: 3 * BLOCK], 2)
    node.add_work(big)
    node.run()
    assert node.emitted_tokens(big) == expected_tokens(big)
    again = make_work("c", PROMPT[:20], 2)
    sequence = node.add_work(again)
    node.run()
    assert node.emitted_tokens(again) == expected_tokens(again)
    assert sequence.num_cached_tokens in (0, BLOCK)


def test_choices_share_the_whole_blocks() -> None:
    node = SteppedNode()
    works = [make_choice(make_work("a", PROMPT[:40], 30), number) for number in range(3)]
    sequences = []
    for work in works:
        sequences.append(node.add_work(work))
        node.step()
    tables = [sequence.block_table for sequence in sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    lasts = {table[2] for table in tables}
    assert len(lasts) == 3, "each writes behind the prompt in a block of its own"
    assert all(node.pool.ownership.get_ref_count(BlockIndex(block)) == 3 for block in tables[0][:2])
    node.run()


def test_choices_sample_different_noise() -> None:
    node = SteppedNode()
    node.add_work(make_choice(make_work("a", PROMPT[:4], 1), 3))
    batch = node.step()
    assert batch is not None
    assert batch.slices[0].sample_spec is not None
    assert batch.slices[0].sample_spec.choice_index == 3
