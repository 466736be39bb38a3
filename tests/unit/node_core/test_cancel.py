"""Cancel, stop and release in every state: a state that is new fails here until it is covered."""

from collections.abc import Callable

import pytest

from baton.types import TicketId, Work
from node_engine.core.ledger import BlockState, LedgerError
from node_engine.core.sequence import Sequence, SequenceState
from node_engine.core.step import StepBatch
from tests.unit.node_core.nodes import BLOCK, Node, expected, work

PROMPT = [(11 * position) % 991 + 1 for position in range(100)]
VICTIM = work("victim", PROMPT, 30)
WITNESS = work("witness", [*PROMPT[:40], *PROMPT[:40]], 30)  # shares blocks with the victim
T = TicketId("t")


def a_node() -> Node:
    """A cache that knows the first blocks of the victim, and a sequence that runs beside it."""
    node = Node(max_batched_tokens=48, max_num_seqs=4)
    node.add(WITNESS)
    node.step()
    node.step()
    return node


def waiting(node: Node) -> Sequence:
    return node.add(VICTIM)


def prefilling(node: Node) -> Sequence:
    sequence = node.add(VICTIM, hand_off=True)
    node.scheduler.ticket_arrived(VICTIM.key)
    node.step()
    return sequence


def handing_off(node: Node) -> Sequence:
    sequence = prefilling(node)
    while sequence.state is SequenceState.PREFILLING:
        node.step()
    return sequence


def awaiting_kv(node: Node) -> Sequence:
    sequence = node.scheduler.expect(VICTIM, node.root, T)
    assert isinstance(sequence, Sequence)
    return sequence


def running(node: Node) -> Sequence:
    sequence = node.add(VICTIM)
    while sequence.state is not SequenceState.RUNNING:
        node.step()
    return sequence


def finished(node: Node) -> Sequence:
    sequence = node.add(VICTIM)
    node.scheduler.cancel(VICTIM.key)
    return sequence


REACH: dict[SequenceState, Callable[[Node], Sequence]] = {
    SequenceState.WAITING: waiting,
    SequenceState.PREFILLING: prefilling,
    SequenceState.HANDING_OFF: handing_off,
    SequenceState.AWAITING_KV: awaiting_kv,
    SequenceState.RUNNING: running,
    SequenceState.FINISHED: finished,
}
every_state = pytest.mark.parametrize("state", SequenceState, ids=lambda state: state.value)


def settle(node: Node) -> None:
    """The witness is untouched, and afterwards every block is free or cached."""
    node.run()
    assert node.emitted(WITNESS) == expected(WITNESS)
    assert node.scheduler.sequences() == ()
    assert node.pool.available == node.pool.total
    assert not node.pool.ledger().entries


def lose_ticket(node: Node) -> None:
    if node.pool.count(BlockState.RESERVED):
        node.pool.quarantine(T)
        node.pool.fenced(T)


def run_rest(node: Node, batch: StepBatch | None) -> None:
    if batch is not None:
        node.outcomes += node.scheduler.update(batch, node.engine.run(batch))


def test_every_state_is_reached() -> None:
    assert set(REACH) == set(SequenceState)
    for state, reach in REACH.items():
        assert reach(a_node()).state is state


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_cancel(state: SequenceState, in_flight: bool) -> None:
    node = a_node()
    sequence = REACH[state](node)
    batch = node.scheduler.next_step().batch if in_flight else None
    live = state is not SequenceState.FINISHED
    assert node.scheduler.cancel(VICTIM.key) is live
    assert not node.scheduler.cancel(VICTIM.key)
    assert sequence.state is SequenceState.FINISHED
    assert sequence.block_table == []
    before = len(node.emitted(VICTIM))
    run_rest(node, batch)
    assert node.pool.held_by(str(VICTIM.key)) == 0
    lose_ticket(node)
    settle(node)
    assert len(node.emitted(VICTIM)) == before, "nothing is emitted after a cancel"


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_the_same_key_may_come_again_at_once(state: SequenceState, in_flight: bool) -> None:
    node = a_node()
    REACH[state](node)
    batch = node.scheduler.next_step().batch if in_flight else None
    node.scheduler.cancel(VICTIM.key)
    before = len(node.emitted(VICTIM))
    node.add(VICTIM)
    run_rest(node, batch)
    lose_ticket(node)
    node.run()
    events = [each.event.token for each in node.outcomes if each.sequence.key == VICTIM.key and hasattr(each, "event")]
    assert events[-30:] == expected(VICTIM)
    assert before <= len(events) - 30
    settle(node)


@every_state
@pytest.mark.parametrize("in_flight", [False, True])
def test_stop_and_release(state: SequenceState, in_flight: bool) -> None:
    node = a_node()
    sequence = REACH[state](node)
    batch = node.scheduler.next_step().batch if in_flight else None
    if sequence.state in (SequenceState.WAITING, SequenceState.PREFILLING, SequenceState.HANDING_OFF):
        held = node.pool.held_by(str(VICTIM.key))
        node.scheduler.stop(VICTIM.key)
        run_rest(node, batch)
        node.run()
        assert sequence.state is SequenceState.HANDING_OFF
        assert held - 1 <= node.pool.held_by(str(VICTIM.key)) <= held, "all but the source of a copy"
        node.scheduler.release(VICTIM.key)
    else:
        with pytest.raises(LedgerError):
            node.scheduler.stop(VICTIM.key)
        with pytest.raises(LedgerError):
            node.scheduler.release(VICTIM.key)
        node.scheduler.cancel(VICTIM.key)
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
    sequence = Node().add(Work(VICTIM.key, VICTIM.request))
    sequence.state = source
    if (source, target) in legal or (target is SequenceState.FINISHED and source is not target):
        sequence.become(target)
        assert sequence.state is target
    else:
        with pytest.raises(LedgerError, match="cannot become"):
            sequence.become(target)


def test_a_cancelled_hand_off_leaves_its_ticket_to_the_fence() -> None:
    node = Node(num_blocks=10)
    node.add(work("warm", PROMPT[: 2 * BLOCK], 1))
    node.run()
    node.scheduler.expect(VICTIM, node.root, T)
    node.pool.mark_writing(T)
    assert node.scheduler.cancel(VICTIM.key)
    assert node.pool.counts() == {
        BlockState.FREE: 3,
        BlockState.CACHED: 2,
        BlockState.WRITING: 5,
        BlockState.IN_USE: 0,
        BlockState.RESERVED: 0,
        BlockState.QUARANTINED: 0,
    }
