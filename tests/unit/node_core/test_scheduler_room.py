"""Who gives way when blocks run out, and what may happen while a step is computed."""

import pytest

from baton.types import TicketId
from node_engine.core.ledger import BlockState, LedgerError
from node_engine.core.outcome import Dropped, Failed, PrefillCompleted
from node_engine.core.residency import Refusal
from node_engine.core.sequence import SequenceState, pin_label
from node_engine.core.step import StepBatch
from tests.unit.node_core.nodes import PROMPT, Node, T, expected, other, shape, work

# when blocks run out


def test_a_younger_prompt_gives_way_half_computed() -> None:
    node = Node(num_blocks=6, max_num_seqs=2, max_batched_tokens=17)
    old, young = work("old", other(15, 1), 30), work("young", other(64, 2), 30)
    node.add(old)
    node.step()
    node.add(young)
    node.step()
    assert node.pool.reserve(1, T, "someone else") is not None
    node.run()
    assert node.errors() == {young.key: "preempted"}
    assert node.emitted(young) == []
    assert node.emitted(old) == expected(old)


def test_preemption_returns_blocks_and_lets_the_oldest_finish() -> None:
    node = Node(num_blocks=6, max_num_seqs=3, max_batched_tokens=64)
    jobs = [work(name, other(16, name), 60) for name in range(3)]
    for job in jobs:
        node.add(job)
    node.run()
    assert node.emitted(jobs[0]) == expected(jobs[0])
    assert node.errors() == {jobs[2].key: "preempted", jobs[1].key: "preempted"}
    for job in jobs[1:]:
        seen = node.emitted(job)
        assert seen == expected(job)[: len(seen)]
    assert node.pool.count(BlockState.IN_USE) == 0


def test_what_outgrows_the_cache_fails() -> None:
    node = Node(num_blocks=2)
    job = work("a", PROMPT[:20], 50)
    node.add(job)
    node.run()
    assert node.errors() == {job.key: "out_of_blocks"}
    assert node.emitted(job) == expected(job)[:13], "33 tokens: the KV of the last one has no room"
    [failed] = [each for each in node.outcomes if isinstance(each, Failed)]
    assert "needs 3 blocks, the cache has 2" in failed.error.message
    assert node.pool.count(BlockState.IN_USE) == 0


def test_what_is_pinned_is_waited_for() -> None:
    """The oldest sequence needs a block, and everything else is under a ticket: it goes on when that is fenced."""
    node = Node(num_blocks=4, max_num_seqs=2)
    job = work("a", PROMPT[:10], 30)
    node.add(job)
    node.step()
    awaited = work("b", other(32, 1))
    assert not isinstance(node.scheduler.expect(awaited, node.root, T), Refusal)
    node.pool.reserve(1, TicketId("u"), "someone else")
    node.run()
    waiting = node.emitted(job)
    assert len(waiting) < 30
    assert node.step() is None
    assert node.scheduler.cancel(awaited.key)
    node.pool.quarantine(T)
    assert node.step() is None, "in quarantine nothing may be reused"
    node.pool.fenced(T)
    node.run()
    assert node.emitted(job) == expected(job)


def test_speculative_work_is_dropped_first_newest_first() -> None:
    node = Node(num_blocks=8, max_num_seqs=8, max_batched_tokens=64)
    guesses = [work(f"guess{salt}", other(32, salt)) for salt in range(3)]
    for guess in guesses:
        node.add(guess, hand_off=True)
    node.step()
    node.step()
    firm = work("firm", other(60, 9))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    node.step()
    dropped = [each.sequence.key for each in node.outcomes if isinstance(each, Dropped)]
    assert dropped == [guesses[2].key]
    sequence = node.scheduler.get(guesses[2].key)
    assert sequence is not None
    assert (sequence.state, sequence.block_table, sequence.num_computed) == (SequenceState.WAITING, [], 0)
    node.scheduler.release(firm.key)
    node.run()
    completed = [each.event for each in node.outcomes if isinstance(each, PrefillCompleted)]
    again = [event.token for event in completed if event.key == guesses[2].key]
    assert set(again) == set(expected(guesses[2])[:1])
    assert sequence.state is SequenceState.HANDING_OFF


def test_blocks_that_a_sender_still_holds_are_on_their_way() -> None:
    """A hand-off's own references outlive the drop for a moment: that is no reason to drop the next one as well."""
    node = Node(num_blocks=8, max_num_seqs=8, max_batched_tokens=128)
    guesses = [node.add(work(f"guess{salt}", other(32, salt)), hand_off=True) for salt in range(4)]
    node.run()
    tables = [tuple(guess.block_table) for guess in guesses]
    for guess in guesses:
        node.pool.share(guess.block_table, pin_label(guess.key))
    firm = work("firm", other(20, 9))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    for _ in range(3):
        assert node.step() is None
    assert [each.sequence for each in node.outcomes if isinstance(each, Dropped)] == [guesses[3]]
    node.scheduler.cancel(guesses[3].key)
    node.pool.release(tables[3], pin_label(guesses[3].key))
    assert shape(node.step()) == [(0, 20, True)]


def test_growth_waits_for_what_a_sender_still_holds() -> None:
    node = Node(num_blocks=4, max_num_seqs=4)
    old, young = work("old", other(15, 1), 30), work("young", other(3, 2), 12)
    guess = node.add(work("guess", other(30, 3)), hand_off=True)
    node.add(old)
    node.add(young)
    node.step()
    node.pool.share(guess.block_table, pin_label(guess.key))
    table = tuple(guess.block_table)
    node.run()
    assert [each.sequence for each in node.outcomes if isinstance(each, Dropped)] == [guess]
    assert len(node.emitted(old)) < 30
    assert node.emitted(young) == expected(young), "it was not preempted for what is on its way"
    node.scheduler.cancel(guess.key)
    node.pool.release(table, pin_label(guess.key))
    node.run()
    assert node.emitted(old) == expected(old)


def test_growth_takes_from_the_speculative_before_it_preempts() -> None:
    node = Node(num_blocks=4, max_num_seqs=4)
    old, young, guess = work("old", other(15, 1), 16), work("young", other(15, 2), 16), work("guess", other(16, 3))
    node.add(old)
    node.add(guess, hand_off=True)
    node.add(young)
    node.run()
    assert node.errors() == {}
    assert [each.sequence.key for each in node.outcomes if isinstance(each, Dropped)] == [guess.key]
    assert node.emitted(old) == expected(old)
    assert node.emitted(young) == expected(young)


def test_nothing_is_dropped_in_vain() -> None:
    node = Node(num_blocks=8, max_num_seqs=8)
    pinned, guess = work("pinned", other(64, 1)), work("guess", other(32, 2))
    node.add(pinned, hand_off=True)
    node.scheduler.ticket_arrived(pinned.key)
    node.add(guess, hand_off=True)
    node.run()
    firm = work("firm", other(80, 3))
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    assert node.step() is None
    assert not [each for each in node.outcomes if isinstance(each, Dropped)], (
        "4 + 2 blocks are less than 5 and 4 pinned"
    )
    node.scheduler.release(pinned.key)
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)][-1] == firm.key


def test_a_ticket_makes_firm() -> None:
    node = Node(num_blocks=8, max_num_seqs=8)
    guess, firm = work("guess", other(64, 1)), work("firm", other(80, 2))
    node.add(guess, hand_off=True)
    node.run()
    node.scheduler.ticket_arrived(guess.key)
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    assert node.step() is None
    assert node.pool.held_by(str(guess.key)) == 4


def test_the_firm_go_before_the_speculative() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    guess, firm = work("guess", other(64, 1)), work("firm", other(32, 2))
    node.add(guess, hand_off=True)
    node.step()
    node.add(firm, hand_off=True)
    node.scheduler.ticket_arrived(firm.key)
    batch = node.step()
    assert shape(batch) == [(0, 32, True)]


def test_a_late_ticket_overtakes_nobody_who_writes() -> None:
    """Decode gives a hand-off up in which nothing moves for a while: an older prompt, however long, must wait its turn
    if its ticket came later."""
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    long, begun = work("long", other(512, 1)), work("begun", other(96, 2))
    node.add(long, hand_off=True)
    node.add(begun, hand_off=True)
    node.scheduler.ticket_arrived(begun.key)
    assert shape(node.step()) == [(0, 32, False)]
    node.scheduler.ticket_arrived(long.key)
    assert shape(node.step()) == [(32, 32, False)]
    assert shape(node.step()) == [(64, 32, True)]
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)] == [begun.key, long.key]


# between next_step and update


def test_a_step_that_failed_is_tried_again() -> None:
    node = Node()
    node.add(work("warm", PROMPT[:32], 1))
    node.run()
    job = work("a", PROMPT[:30], 5)
    node.add(job)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.abandon(plan.batch)
    node.pool.check()
    again = node.scheduler.next_step()
    assert again.batch == plan.batch
    node.scheduler.abandon(again.batch)
    node.run()
    assert node.emitted(job) == expected(job)


def test_one_step_at_a_time() -> None:
    node = Node()
    node.add(work("a", PROMPT[:30], 5))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    with pytest.raises(LedgerError, match="in flight"):
        node.scheduler.next_step()
    with pytest.raises(LedgerError, match="in flight"):
        node.scheduler.update(StepBatch(()), ())
    with pytest.raises(ValueError, match="zip"):
        node.scheduler.update(plan.batch, ())


@pytest.mark.parametrize("how", ["update", "abandon"])
def test_blocks_being_written_return_when_the_step_has_ended(how: str) -> None:
    node = Node()
    job, stays = work("a", other(30, 1)), work("b", other(30, 2))
    node.add(job)
    node.add(stays)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    assert node.scheduler.cancel(job.key)
    assert node.pool.held_by(str(job.key)) == 2, "the engine may be writing them"
    if how == "update":
        outcomes = node.scheduler.update(plan.batch, node.engine.run(plan.batch))
        assert [each.sequence.key for each in outcomes] == [stays.key]
    else:
        node.scheduler.abandon(plan.batch)
    assert node.pool.held_by(str(job.key)) == 0
    assert node.scheduler.get(job.key) is None
    assert not node.scheduler.cancel(job.key)
    node.pool.check()


def test_stopping_keeps_blocks_for_the_sender() -> None:
    node = Node(max_batched_tokens=32, max_num_seqs=4)
    job = work("a", other(100, 1))
    node.add(job, hand_off=True)
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.scheduler.stop(job.key)
    assert node.scheduler.update(plan.batch, node.engine.run(plan.batch)) == []
    assert node.step() is None, "nothing more is computed"
    assert node.pool.held_by(str(job.key)) == 7
    firm = work("firm", other(16 * 60, 2))
    node.add(firm)
    assert node.step() is None, "and nothing is dropped: a sender may be reading"
    node.scheduler.release(job.key)
    assert node.pool.held_by(str(job.key)) == 0
    assert node.step() is not None
