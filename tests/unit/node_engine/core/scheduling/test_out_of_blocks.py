"""Who gives way when blocks run out, and what may happen while a step is computed."""

import pytest

from baton.types import TicketId
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState
from node_engine.core.scheduling.capacity import CapacityRefusal
from node_engine.core.sequences.outcomes import PrefillCompleted, PrefillRequeued, SequenceFailed
from node_engine.core.sequences.sequence import SequenceState, handoff_owner_label
from node_engine.core.step.step_batch import StepBatch
from tests.unit.node_engine.core.stepped_node import (
    PROMPT,
    TICKET_ID,
    SteppedNode,
    batch_shape,
    expected_tokens,
    make_work,
    unshared_prompt,
)

# when blocks run out


def test_newer_prefill_is_preempted_half_computed() -> None:
    node = SteppedNode(num_blocks=6, max_num_seqs=2, max_batched_tokens=17)
    old, young = (
        make_work("old", unshared_prompt(15, 1), 30),
        make_work("young", unshared_prompt(64, 2), 30),
    )
    node.add_work(old)
    node.step()
    node.add_work(young)
    node.step()
    assert node.pool.reservations.reserve_for_ticket(1, TICKET_ID, "someone else") is not None
    node.run()
    assert node.error_codes() == {young.key: "preempted"}
    assert node.emitted_tokens(young) == []
    assert node.emitted_tokens(old) == expected_tokens(old)


def test_preemption_returns_blocks_and_lets_the_oldest_finish() -> None:
    node = SteppedNode(num_blocks=6, max_num_seqs=3, max_batched_tokens=64)
    works = [make_work(name, unshared_prompt(16, name), 60) for name in range(3)]
    for work in works:
        node.add_work(work)
    node.run()
    assert node.emitted_tokens(works[0]) == expected_tokens(works[0])
    assert node.error_codes() == {works[2].key: "preempted", works[1].key: "preempted"}
    for work in works[1:]:
        seen = node.emitted_tokens(work)
        assert seen == expected_tokens(work)[: len(seen)]
    assert node.pool.ownership.count_blocks(BlockState.IN_USE) == 0


def test_sequence_larger_than_the_cache_fails() -> None:
    node = SteppedNode(num_blocks=2)
    work = make_work("a", PROMPT[:20], 50)
    node.add_work(work)
    node.run()
    assert node.error_codes() == {work.key: "out_of_blocks"}
    assert node.emitted_tokens(work) == expected_tokens(work)[:13], (
        "33 tokens: the KV of the last one has no room"
    )
    [failed] = [each for each in node.outcomes if isinstance(each, SequenceFailed)]
    assert "needs 3 blocks, the cache has 2" in failed.error.message
    assert node.pool.ownership.count_blocks(BlockState.IN_USE) == 0


def test_growth_waits_for_reserved_blocks() -> None:
    """The oldest sequence needs a block, and everything else is under a ticket: it goes on when
    that is fenced."""
    node = SteppedNode(num_blocks=4, max_num_seqs=2)
    work = make_work("a", PROMPT[:10], 30)
    node.add_work(work)
    node.step()
    awaited = make_work("b", unshared_prompt(32, 1))
    assert not isinstance(
        node.scheduler.reserve_for_handoff(awaited, node.root, TICKET_ID), CapacityRefusal
    )
    node.pool.reservations.reserve_for_ticket(1, TicketId("u"), "someone else")
    node.run()
    waiting = node.emitted_tokens(work)
    assert len(waiting) < 30
    assert node.step() is None
    assert node.scheduler.cancel_sequence(awaited.key)
    node.pool.reservations.quarantine_ticket(TICKET_ID)
    assert node.step() is None, "in quarantine nothing may be reused"
    node.pool.reservations.free_quarantined_ticket(TICKET_ID)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)


def test_unticketed_prefill_is_requeued_newest_first() -> None:
    node = SteppedNode(num_blocks=8, max_num_seqs=8, max_batched_tokens=64)
    unticketed_works = [make_work(f"guess{salt}", unshared_prompt(32, salt)) for salt in range(3)]
    for unticketed in unticketed_works:
        node.add_work(unticketed, is_prefill_only=True)
    node.step()
    node.step()
    ticketed = make_work("ticketed", unshared_prompt(60, 9))
    node.add_work(ticketed, is_prefill_only=True)
    node.scheduler.mark_ticketed(ticketed.key)
    node.step()
    dropped = [each.sequence.key for each in node.outcomes if isinstance(each, PrefillRequeued)]
    assert dropped == [unticketed_works[2].key]
    sequence = node.scheduler.sequences.get(unticketed_works[2].key)
    assert sequence is not None
    assert (sequence.state, sequence.block_table, sequence.num_computed_tokens) == (
        SequenceState.WAITING,
        [],
        0,
    )
    node.scheduler.finish_handoff(ticketed.key)
    node.run()
    completed = [each.event for each in node.outcomes if isinstance(each, PrefillCompleted)]
    again = [event.token_id for event in completed if event.key == unticketed_works[2].key]
    assert set(again) == set(expected_tokens(unticketed_works[2])[:1])
    assert sequence.state is SequenceState.HANDING_OFF


def test_blocks_pinned_by_a_sender_count_as_releasing() -> None:
    """A hand-off's own references outlive the drop for a moment: that is no reason to drop the next
    one as well."""
    node = SteppedNode(num_blocks=8, max_num_seqs=8, max_batched_tokens=128)
    unticketed_works = [
        node.add_work(make_work(f"guess{salt}", unshared_prompt(32, salt)), is_prefill_only=True)
        for salt in range(4)
    ]
    node.run()
    tables = [tuple(unticketed.block_table) for unticketed in unticketed_works]
    for unticketed in unticketed_works:
        node.pool.share_blocks(unticketed.block_table, handoff_owner_label(unticketed.key))
    ticketed = make_work("ticketed", unshared_prompt(20, 9))
    node.add_work(ticketed, is_prefill_only=True)
    node.scheduler.mark_ticketed(ticketed.key)
    for _ in range(3):
        assert node.step() is None
    assert [each.sequence for each in node.outcomes if isinstance(each, PrefillRequeued)] == [
        unticketed_works[3]
    ]
    node.scheduler.cancel_sequence(unticketed_works[3].key)
    node.pool.release_blocks(tables[3], handoff_owner_label(unticketed_works[3].key))
    assert batch_shape(node.step()) == [(0, 20, True)]


def test_growth_waits_for_what_a_sender_still_holds() -> None:
    node = SteppedNode(num_blocks=4, max_num_seqs=4)
    old, young = (
        make_work("old", unshared_prompt(15, 1), 30),
        make_work("young", unshared_prompt(3, 2), 12),
    )
    unticketed = node.add_work(
        make_work("unticketed", unshared_prompt(30, 3)), is_prefill_only=True
    )
    node.add_work(old)
    node.add_work(young)
    node.step()
    node.pool.share_blocks(unticketed.block_table, handoff_owner_label(unticketed.key))
    table = tuple(unticketed.block_table)
    node.run()
    assert [each.sequence for each in node.outcomes if isinstance(each, PrefillRequeued)] == [
        unticketed
    ]
    assert len(node.emitted_tokens(old)) < 30
    assert node.emitted_tokens(young) == expected_tokens(young), (
        "it was not preempted for what is on its way"
    )
    node.scheduler.cancel_sequence(unticketed.key)
    node.pool.release_blocks(table, handoff_owner_label(unticketed.key))
    node.run()
    assert node.emitted_tokens(old) == expected_tokens(old)


def test_growth_requeues_unticketed_before_preempting() -> None:
    node = SteppedNode(num_blocks=4, max_num_seqs=4)
    old, young, unticketed = (
        make_work("old", unshared_prompt(15, 1), 16),
        make_work("young", unshared_prompt(15, 2), 16),
        make_work("unticketed", unshared_prompt(16, 3)),
    )
    node.add_work(old)
    node.add_work(unticketed, is_prefill_only=True)
    node.add_work(young)
    node.run()
    assert node.error_codes() == {}
    assert [each.sequence.key for each in node.outcomes if isinstance(each, PrefillRequeued)] == [
        unticketed.key
    ]
    assert node.emitted_tokens(old) == expected_tokens(old)
    assert node.emitted_tokens(young) == expected_tokens(young)


def test_nothing_is_requeued_in_vain() -> None:
    node = SteppedNode(num_blocks=8, max_num_seqs=8)
    pinned, unticketed = (
        make_work("pinned", unshared_prompt(64, 1)),
        make_work("unticketed", unshared_prompt(32, 2)),
    )
    node.add_work(pinned, is_prefill_only=True)
    node.scheduler.mark_ticketed(pinned.key)
    node.add_work(unticketed, is_prefill_only=True)
    node.run()
    ticketed = make_work("ticketed", unshared_prompt(80, 3))
    node.add_work(ticketed, is_prefill_only=True)
    node.scheduler.mark_ticketed(ticketed.key)
    assert node.step() is None
    assert not [each for each in node.outcomes if isinstance(each, PrefillRequeued)], (
        "4 + 2 blocks are less than 5 and 4 pinned"
    )
    node.scheduler.finish_handoff(pinned.key)
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)][
        -1
    ] == ticketed.key


def test_ticketed_prefill_is_not_requeued() -> None:
    node = SteppedNode(num_blocks=8, max_num_seqs=8)
    unticketed, ticketed = (
        make_work("unticketed", unshared_prompt(64, 1)),
        make_work("ticketed", unshared_prompt(80, 2)),
    )
    node.add_work(unticketed, is_prefill_only=True)
    node.run()
    node.scheduler.mark_ticketed(unticketed.key)
    node.add_work(ticketed, is_prefill_only=True)
    node.scheduler.mark_ticketed(ticketed.key)
    assert node.step() is None
    assert node.pool.ownership.count_blocks_held_by(str(unticketed.key)) == 4


def test_ticketed_prefill_goes_before_unticketed() -> None:
    node = SteppedNode(max_batched_tokens=32, max_num_seqs=4)
    unticketed, ticketed = (
        make_work("unticketed", unshared_prompt(64, 1)),
        make_work("ticketed", unshared_prompt(32, 2)),
    )
    node.add_work(unticketed, is_prefill_only=True)
    node.step()
    node.add_work(ticketed, is_prefill_only=True)
    node.scheduler.mark_ticketed(ticketed.key)
    batch = node.step()
    assert batch_shape(batch) == [(0, 32, True)]


def test_late_ticket_does_not_overtake_a_started_prefill() -> None:
    """Decode gives a hand-off up in which nothing moves for a while: an older prompt, however long,
    must wait its turn if its ticket came later."""
    node = SteppedNode(max_batched_tokens=32, max_num_seqs=4)
    long, begun = (
        make_work("long", unshared_prompt(512, 1)),
        make_work("begun", unshared_prompt(96, 2)),
    )
    node.add_work(long, is_prefill_only=True)
    node.add_work(begun, is_prefill_only=True)
    node.scheduler.mark_ticketed(begun.key)
    assert batch_shape(node.step()) == [(0, 32, False)]
    node.scheduler.mark_ticketed(long.key)
    assert batch_shape(node.step()) == [(32, 32, False)]
    assert batch_shape(node.step()) == [(64, 32, True)]
    node.run()
    assert [each.event.key for each in node.outcomes if isinstance(each, PrefillCompleted)] == [
        begun.key,
        long.key,
    ]


# between next_step and update


def test_a_step_that_failed_is_tried_again() -> None:
    node = SteppedNode()
    node.add_work(make_work("warm", PROMPT[:32], 1))
    node.run()
    work = make_work("a", PROMPT[:30], 5)
    node.add_work(work)
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    node.scheduler.abandon_step(plan.batch)
    node.pool.check_invariants()
    again = node.scheduler.schedule_step()
    assert again.batch == plan.batch
    node.scheduler.abandon_step(again.batch)
    node.run()
    assert node.emitted_tokens(work) == expected_tokens(work)


def test_one_step_at_a_time() -> None:
    node = SteppedNode()
    node.add_work(make_work("a", PROMPT[:30], 5))
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    with pytest.raises(BlockLedgerError, match="in flight"):
        node.scheduler.schedule_step()
    with pytest.raises(BlockLedgerError, match="in flight"):
        node.scheduler.update_from_results(StepBatch(()), ())
    with pytest.raises(ValueError, match="zip"):
        node.scheduler.update_from_results(plan.batch, ())


@pytest.mark.parametrize("how", ["update", "abandon"])
def test_blocks_being_written_return_when_the_step_has_ended(how: str) -> None:
    node = SteppedNode()
    work, stays = make_work("a", unshared_prompt(30, 1)), make_work("b", unshared_prompt(30, 2))
    node.add_work(work)
    node.add_work(stays)
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    assert node.scheduler.cancel_sequence(work.key)
    assert node.pool.ownership.count_blocks_held_by(str(work.key)) == 2, (
        "the engine may be writing them"
    )
    if how == "update":
        outcomes = node.scheduler.update_from_results(plan.batch, node.engine.run(plan.batch))
        assert [each.sequence.key for each in outcomes] == [stays.key]
    else:
        node.scheduler.abandon_step(plan.batch)
    assert node.pool.ownership.count_blocks_held_by(str(work.key)) == 0
    assert node.scheduler.sequences.get(work.key) is None
    assert not node.scheduler.cancel_sequence(work.key)
    node.pool.check_invariants()


def test_stopping_keeps_blocks_for_the_sender() -> None:
    node = SteppedNode(max_batched_tokens=32, max_num_seqs=4)
    work = make_work("a", unshared_prompt(100, 1))
    node.add_work(work, is_prefill_only=True)
    plan = node.scheduler.schedule_step()
    assert plan.batch is not None
    node.scheduler.stop_prefill(work.key)
    assert node.scheduler.update_from_results(plan.batch, node.engine.run(plan.batch)) == []
    assert node.step() is None, "nothing more is computed"
    assert node.pool.ownership.count_blocks_held_by(str(work.key)) == 7
    ticketed = make_work("ticketed", unshared_prompt(16 * 60, 2))
    node.add_work(ticketed)
    assert node.step() is None, "and nothing is dropped: a sender may be reading"
    node.scheduler.finish_handoff(work.key)
    assert node.pool.ownership.count_blocks_held_by(str(work.key)) == 0
    assert node.step() is not None
