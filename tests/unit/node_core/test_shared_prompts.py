"""Several choices of one prompt on one node: the prompt is computed once, and nobody sees another's own tokens."""

from dataclasses import replace

import pytest

from baton.types import BlockIndex, TicketId, Work
from node_engine.core.ledger import BlockState
from node_engine.core.residency import Refusal
from tests.unit.node_core.nodes import BLOCK, Node, deliver, expected, work

PROMPT = tuple((17 * position) % 983 + 1 for position in range(150))
LENGTHS = [2, 15, 16, 17, 18, 31, 32, 33, 40]


def choice(job: Work, number: int) -> Work:
    key = job.key._replace(choice=number)
    return Work(key, replace(job.request, choice=number), job.emitted)


def hand_over(prefill: Node, decode: Node, job: Work) -> None:
    ticket = TicketId(str(job.key))
    prefill.add(job, hand_off=True)
    assert not isinstance(decode.scheduler.expect(job, decode.root, ticket), Refusal)
    prefill.run()
    deliver(prefill, decode, job.key, ticket)


@pytest.mark.parametrize("steps", [0, 1, 5, 20, 100], ids=lambda steps: f"after {steps} steps")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_second_choice_computes_one_token(length: int, steps: int) -> None:
    """Whether the first has just been handed over, is writing behind the prompt, has filled the prompt's last block,
    or is over."""
    prefill, decode = Node(), Node()
    first = work("a", PROMPT[:length], 30)
    hand_over(prefill, decode, first)
    for _ in range(steps):
        decode.step()
    second, third = choice(first, 1), choice(first, 2)
    for job in (second, third):
        assert decode.scheduler.survey(job, decode.root).lacking == 1
    added = decode.add(second)
    decode.step()
    also = decode.add(third)
    decode.run()
    assert added.num_cached == also.num_cached == length - 1
    for job in (first, second, third):
        assert decode.emitted(job) == expected(job)
    for node in (prefill, decode):
        assert node.pool.count(BlockState.IN_USE) == 0
        assert sum(node.pool.counts().values()) == node.pool.total


@pytest.mark.parametrize("length", [17, 40])
def test_the_first_may_end_before_the_copy_is_made(length: int) -> None:
    node = Node()
    first = work("a", PROMPT[:length], 30)
    node.add(first)
    node.step()
    second = choice(first, 1)
    added = node.add(second)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.cancel(first.key)
    node.outcomes += node.scheduler.update(plan.batch, node.engine.run(plan.batch))
    node.pool.check()
    node.run()
    assert added.num_cached == length - 1
    assert node.emitted(second) == expected(second)
    assert node.pool.count(BlockState.IN_USE) == 0


def test_tokens_behind_the_prompt_are_not_found_before_their_block_is_full() -> None:
    node = Node()
    first = work("a", PROMPT[:20], 30)
    sequence = node.add(first)
    for _ in range(6):
        node.step()
    so_far = tuple(sequence.tokens)
    assert len(so_far) == 26
    longer = work("b", (*so_far, 5), 4)
    assert node.scheduler.survey(longer, node.root).lacking == 27 - 20
    block = sequence.block_table[1]
    assert node.pool.index.entry(block).tokens == PROMPT[16:20]
    for _ in range(8):
        node.step()
    assert node.pool.index.entry(block).tokens == tuple(sequence.tokens[16:32])
    assert node.scheduler.survey(longer, node.root).lacking == 1


def test_one_end_of_a_prompt_is_kept_of_many() -> None:
    node = Node()
    jobs = [choice(work("a", PROMPT[:20], 3), number) for number in range(5)]
    for job in jobs:
        node.add(job)
        node.step()
    node.run()
    for job in jobs:
        assert node.emitted(job) == expected(job)
    assert node.pool.count(BlockState.CACHED) == 2, "a whole block, and four tokens of the next"


def test_the_end_of_a_prompt_makes_way_like_any_cached_block() -> None:
    node = Node(num_blocks=4)
    node.add(work("a", PROMPT[:20], 2))
    node.run()
    assert node.pool.count(BlockState.CACHED) == 2
    big = work("b", PROMPT[::-1][: 3 * BLOCK], 2)
    node.add(big)
    node.run()
    assert node.emitted(big) == expected(big)
    again = work("c", PROMPT[:20], 2)
    sequence = node.add(again)
    node.run()
    assert node.emitted(again) == expected(again)
    assert sequence.num_cached in (0, BLOCK)


def test_choices_share_the_whole_blocks() -> None:
    node = Node()
    jobs = [choice(work("a", PROMPT[:40], 30), number) for number in range(3)]
    sequences = []
    for job in jobs:
        sequences.append(node.add(job))
        node.step()
    tables = [sequence.block_table for sequence in sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    lasts = {table[2] for table in tables}
    assert len(lasts) == 3, "each writes behind the prompt in a block of its own"
    assert all(node.pool.refs(BlockIndex(block)) == 3 for block in tables[0][:2])
    node.run()


def test_the_choice_reaches_the_noise() -> None:
    node = Node()
    node.add(choice(work("a", PROMPT[:4], 1), 3))
    batch = node.step()
    assert batch is not None
    assert batch.slices[0].sample is not None
    assert batch.slices[0].sample.choice == 3
