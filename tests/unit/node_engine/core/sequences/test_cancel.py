"""Cancel, stop and release in every state: a state that is new fails here until it is covered."""

from collections.abc import Callable

import pytest

from baton.types import AttemptSpec, TicketId
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState
from node_engine.core.sequences.sequence import Sequence, SequenceState
from node_engine.core.step.step_batch import StepBatch
from tests.unit.node_engine.core.stepped_node import BLOCK, SteppedNode, expected_tokens, make_work

PROMPT = [(11 * position) % 991 + 1 for position in range(100)]
VICTIM = make_work("victim", PROMPT, 30)
WITNESS = make_work("witness", [*PROMPT[:40], *PROMPT[:40]], 30)  # shares blocks with the victim
T = TicketId("t")


def make_node() -> SteppedNode:
    """A cache that knows the first blocks of the victim, and a sequence that runs beside it."""
    node = SteppedNode(max_batched_tokens=48, max_num_seqs=4)
    node.add_work(WITNESS)
    node.step()
    node.step()
    return node


def waiting(node: SteppedNode) -> Sequence:
    return node.add_work(VICTIM)


def prefilling(node: SteppedNode) -> Sequence:
    sequence = node.add_work(VICTIM, is_prefill_only=True)
    node.scheduler.mark_ticketed(VICTIM.key)
    node.step()
    return sequence


def handing_off(node: SteppedNode) -> Sequence:
    sequence = prefilling(node)
    while sequence.state is SequenceState.PREFILLING:
        node.step()
    return sequence


def awaiting_kv(node: SteppedNode) -> Sequence:
    sequence = node.scheduler.reserve_for_handoff(VICTIM, node.root, T)
    assert isinstance(sequence, Sequence)
    return sequence


def running(node: SteppedNode) -> Sequence:
    sequence = node.add_work(VICTIM)
    while sequence.state is not SequenceState.RUNNING:
        node.step()
    return sequence


def finished(node: SteppedNode) -> Sequence:
    sequence = node.add_work(VICTIM)
    node.scheduler.cancel_sequence(VICTIM.key)
    return sequence


DRIVERS_BY_STATE: dict[SequenceState, Callable[[SteppedNode], Sequence]] = {
    SequenceState.WAITING: waiting,
    SequenceState.PREFILLING: prefilling,
    SequenceState.HANDING_OFF: handing_off,
    SequenceState.AWAITING_KV: awaiting_kv,
    SequenceState.RUNNING: running,
    SequenceState.FINISHED: finished,
}
every_state = pytest.mark.parametrize("state", SequenceState, ids=lambda state: state.value)


def settle(node: SteppedNode) -> None:
    """The witness is untouched, and afterwards every block is free or cached."""
    node.run()
    assert node.emitted_tokens(WITNESS) == expected_tokens(WITNESS)
    assert len(node.scheduler.sequences) == 0
    assert node.pool.num_available_blocks == node.pool.num_blocks
    assert not node.pool.take_ledger().entries


def lose_ticket(node: SteppedNode) -> None:
    if node.pool.ownership.count_blocks(BlockState.RESERVED):
        node.pool.reservations.quarantine_ticket(T)
        node.pool.reservations.free_quarantined_ticket(T)


def run_rest(node: SteppedNode, batch: StepBatch | None) -> None:
    if batch is not None:
        node.outcomes += node.scheduler.update_from_results(batch, node.engine.run(batch))


def test_every_state_is_reached() -> None:
    assert set(DRIVERS_BY_STATE) == set(SequenceState)
    for state, reach in DRIVERS_BY_STATE.items():
        assert reach(make_node()).state is state


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_cancel(state: SequenceState, in_flight: bool) -> None:
    node = make_node()
    sequence = DRIVERS_BY_STATE[state](node)
    batch = node.scheduler.schedule_step().batch if in_flight else None
    live = state is not SequenceState.FINISHED
    assert node.scheduler.cancel_sequence(VICTIM.key) is live
    assert not node.scheduler.cancel_sequence(VICTIM.key)
    assert sequence.state is SequenceState.FINISHED
    assert sequence.block_table == []
    before = len(node.emitted_tokens(VICTIM))
    run_rest(node, batch)
    assert node.pool.ownership.count_blocks_held_by(str(VICTIM.key)) == 0
    lose_ticket(node)
    settle(node)
    assert len(node.emitted_tokens(VICTIM)) == before, "nothing is emitted after a cancel"


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_cancelled_key_can_be_added_again_at_once(state: SequenceState, in_flight: bool) -> None:
    node = make_node()
    DRIVERS_BY_STATE[state](node)
    batch = node.scheduler.schedule_step().batch if in_flight else None
    node.scheduler.cancel_sequence(VICTIM.key)
    before = len(node.emitted_tokens(VICTIM))
    node.add_work(VICTIM)
    run_rest(node, batch)
    lose_ticket(node)
    node.run()
    events = [
        each.event.token_id
        for each in node.outcomes
        if each.sequence.key == VICTIM.key and hasattr(each, "event")
    ]
    assert events[-30:] == expected_tokens(VICTIM)
    assert before <= len(events) - 30
    settle(node)


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_stop_and_release(state: SequenceState, in_flight: bool) -> None:
    node = make_node()
    sequence = DRIVERS_BY_STATE[state](node)
    batch = node.scheduler.schedule_step().batch if in_flight else None
    if sequence.state in (
        SequenceState.WAITING,
        SequenceState.PREFILLING,
        SequenceState.HANDING_OFF,
    ):
        held = node.pool.ownership.count_blocks_held_by(str(VICTIM.key))
        node.scheduler.stop_prefill(VICTIM.key)
        run_rest(node, batch)
        node.run()
        assert sequence.state is SequenceState.HANDING_OFF
        assert held - 1 <= node.pool.ownership.count_blocks_held_by(str(VICTIM.key)) <= held, (
            "all but the source of a copy"
        )
        node.scheduler.finish_handoff(VICTIM.key)
    else:
        with pytest.raises(BlockLedgerError):
            node.scheduler.stop_prefill(VICTIM.key)
        with pytest.raises(BlockLedgerError):
            node.scheduler.finish_handoff(VICTIM.key)
        node.scheduler.cancel_sequence(VICTIM.key)
        run_rest(node, batch)
    lose_ticket(node)
    settle(node)


@pytest.mark.parametrize("source", SequenceState, ids=lambda state: state.value)
@pytest.mark.parametrize("target", SequenceState, ids=lambda state: state.value)
def test_transitions(source: SequenceState, target: SequenceState) -> None:
    legal = {
        (SequenceState.WAITING, SequenceState.PREFILLING),
        (SequenceState.WAITING, SequenceState.HANDING_OFF),
        (SequenceState.WAITING, SequenceState.AWAITING_KV),
        (SequenceState.PREFILLING, SequenceState.WAITING),
        (SequenceState.PREFILLING, SequenceState.HANDING_OFF),
        (SequenceState.PREFILLING, SequenceState.RUNNING),
        (SequenceState.HANDING_OFF, SequenceState.WAITING),
        (SequenceState.AWAITING_KV, SequenceState.RUNNING),
    }
    sequence = SteppedNode().add_work(AttemptSpec(VICTIM.key, VICTIM.request))
    sequence.state = source
    if (source, target) in legal or (target is SequenceState.FINISHED and source is not target):
        sequence.change_state(target)
        assert sequence.state is target
    else:
        with pytest.raises(BlockLedgerError, match="cannot become"):
            sequence.change_state(target)


def test_a_cancelled_hand_off_leaves_its_ticket_to_the_fence() -> None:
    node = SteppedNode(num_blocks=10)
    node.add_work(make_work("warm", PROMPT[: 2 * BLOCK], 1))
    node.run()
    node.scheduler.reserve_for_handoff(VICTIM, node.root, T)
    node.pool.reservations.mark_writing(T)
    assert node.scheduler.cancel_sequence(VICTIM.key)
    assert node.pool.ownership.count_blocks_by_state() == {
        BlockState.FREE: 3,
        BlockState.CACHED: 2,
        BlockState.WRITING: 5,
        BlockState.IN_USE: 0,
        BlockState.RESERVED: 0,
        BlockState.QUARANTINED: 0,
    }
