"""The compute-bound role with everything real but the plane: every end of every attempt returns every block."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import Cancelled, NodeFailed, PeerGone
from baton.types import Incarnation, NodeName, PeerAddress, SegmentRef, Ticket, TicketId, Work
from kv_transfer.plane import Aborted, Committed, OutboundReport
from node_engine.core.ledger import BlockState
from node_engine.core.messages import Cancel, CoordinatorLost, GiveTicket, Joined, Prefill
from node_engine.core.sequence import SequenceState
from node_engine.paced import PACED_LAYOUT, paced_reference
from prefill_node.role import PrefillRole
from tests.unit.roles.bench import Bench, FakeOutbound, tokens_of, work

REPORT = OutboundReport("memory", 1, 1, 1, 0.0, 0.0)
LAYERS = PACED_LAYOUT.num_layers


class Node(Bench):
    def __init__(self, **sizes: int) -> None:
        self.plane = FakeOutbound()
        super().__init__(lambda parts: PrefillRole(parts, self.plane), **sizes)

    def answer_aborts(self) -> None:
        """The plane has let go of everything that it was told to."""
        for key, error in tuple(self.plane.aborted.items()):
            self.tell(Aborted(key, error))


def ticket(job: Work) -> Ticket:
    peer = PeerAddress(NodeName("d"), Incarnation("decode"), "host", "tcp://127.0.0.1:2")
    offsets = tuple(range(0, 8 * 64, 64))
    return Ticket(
        TicketId("t"),
        job.key,
        peer,
        Incarnation("me"),
        0,
        offsets,
        9,
        9.0,
        "memory",
        SegmentRef("s", peer.incarnation),
        1,
    )


def test_every_layer_of_every_block_is_announced_once_and_then_sealed() -> None:
    node, job = Node(), work(range(1, 151))
    node.tell(Prefill(job, alone=False))
    assert node.plane.opened == {job.key: 150}
    while node.step():
        pass
    announced = [
        (layer, block)
        for layer, first, source in node.plane.ready[job.key]
        for block in range(first, first + len(source))
    ]
    assert sorted(announced) == [(layer, block) for layer in range(LAYERS) for block in range(10)]
    assert node.plane.sealed[job.key].emitted == tuple(paced_reference(job.request.prompt, 1, 1000))
    ended = node.take("prefill_ended")[0]
    assert (ended.computed_tokens, ended.cached_tokens, ended.compute_seconds) == (150, 0, 1.5)
    assert node.held() == {BlockState.IN_USE: 10}  # pinned until the plane has committed
    node.tell(Committed(job.key, REPORT))
    assert node.held() == {}
    assert node.take("handed_off")[0].report.computed_tokens == 150
    assert node.sent == []


def test_a_cached_prefix_is_announced_whole_before_the_first_chunk() -> None:
    node = Node()
    first, second = work(range(1, 81), request="a"), work([*range(1, 65), 900, 901], request="b")
    for job in (first, second):
        node.tell(Prefill(job, alone=False))
        while node.step():
            pass
        node.tell(Committed(job.key, REPORT))
    assert {
        block for _, start, source in node.plane.ready[second.key] for block in range(start, start + len(source))
    } == set(range(5))
    assert node.plane.ready[second.key][0][1:][0] == 0
    assert node.take("prefill_ended")[1].cached_tokens == 64


def test_alone_answers_by_itself() -> None:
    node, job = Node(), work(range(1, 20), max_tokens=1)
    node.tell(Prefill(job, alone=True))
    node.step()
    assert tokens_of(node.take("tokens")[0]) == [(0, paced_reference(job.request.prompt, 1, 1000)[0])]
    assert node.plane.opened == {}
    assert node.held() == {}
    assert node.role.holding == 0


def drive_waiting(node: Node, job: Work) -> None:
    node.tell(Prefill(job, alone=False))


def drive_prefilling(node: Node, job: Work) -> None:
    node.tell(Prefill(job, alone=False))
    node.step()


def drive_handing_off(node: Node, job: Work) -> None:
    """Computed and sealed: the sequence itself has ended, and only the pins are left."""
    node.tell(Prefill(job, alone=False))
    node.tell(GiveTicket(ticket(job)))
    while node.step():
        pass


DRIVE: dict[SequenceState, Callable[[Node, Work], None] | None] = {
    SequenceState.WAITING: drive_waiting,
    SequenceState.PREFILLING: drive_prefilling,
    SequenceState.HANDING_OFF: drive_handing_off,
    SequenceState.AWAITING_KV: None,  # decode's
    SequenceState.RUNNING: None,  # decode's
    SequenceState.FINISHED: None,  # nothing is left to end
}


def test_every_state_is_covered() -> None:
    assert set(DRIVE) == set(SequenceState)


ENDS: dict[str, Callable[[Node, Work], None]] = {
    "cancel": lambda node, job: node.tell(Cancel(job.key, Cancelled("client gone"))),
    "peer gone": lambda node, job: node.tell(Aborted(job.key, PeerGone("decode is gone"))),
    "coordinator lost": lambda node, job: node.tell(CoordinatorLost()),
    "joined anew": lambda node, job: node.tell(Joined(Incarnation("again"))),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", [state for state, drive in DRIVE.items() if drive], ids=lambda state: state.value)
def test_every_end_in_every_state_returns_every_block(state: SequenceState, end: str) -> None:
    node, job = Node(), work(range(1, 151))
    drive = DRIVE[state]
    assert drive is not None
    drive(node, job)
    node.take("prefill_ended")
    ENDS[end](node, job)
    while node.step():
        pass
    if end != "peer gone":
        node.answer_aborts()
    assert node.held() == {}
    assert node.role.holding == 0
    assert len(node.take("failed")) == (1 if end == "peer gone" else 0)
    assert node.sent == []


def test_what_the_plane_may_still_read_stays_pinned_after_a_cancel() -> None:
    node, job = Node(), work(range(1, 151))
    drive_prefilling(node, job)
    node.tell(Cancel(job.key, Cancelled("client gone")))
    assert node.held() == {BlockState.IN_USE: 4}
    node.answer_aborts()
    assert node.held() == {}


@pytest.mark.parametrize("alone", [False, True])
def test_layers_are_announced_only_for_a_hand_off(alone: bool) -> None:
    node = Node()
    node.tell(Prefill(work(range(1, 151)), alone=alone))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    assert (node.role.before_step(plan.batch) is None) == alone


def test_a_failed_step_ends_its_attempts() -> None:
    node, job = Node(), work(range(1, 151))
    node.tell(Prefill(job, alone=False))
    plan = node.scheduler.next_step()
    assert plan.batch is not None
    node.role.before_step(plan.batch)
    node.role.step_failed(plan.batch, NodeFailed("the device fell off"))
    assert node.take("failed")[0].error.code == "node_failed"
    node.answer_aborts()
    assert node.held() == {}


def test_a_hand_off_that_was_over_before_it_began() -> None:
    node, job = Node(), work(range(1, 40))
    node.role.preview(Prefill(job, alone=False))
    node.role.handle(Aborted(job.key, PeerGone("decode is gone")))
    node.role.handle(Prefill(job, alone=False))
    assert node.take("failed")[0].error.code == "peer_gone"
    assert node.held() == {}
    assert not node.step()


def test_a_token_out_of_range_is_refused() -> None:
    node, job = Node(), work([1, 2, 1000])
    node.tell(Prefill(job, alone=False))
    assert node.take("failed")[0].error.code == "invalid_request"
    node.answer_aborts()
    assert node.held() == {}


@pytest.mark.parametrize("bound_to", [b"", b"x" * 32])
def test_a_request_that_is_bound_to_another_model_is_not_computed(bound_to: bytes) -> None:
    node, job = Node(), replace(work([1, 2, 3]), model=bound_to)
    node.tell(Prefill(job, alone=False))
    assert node.take("failed")[0].error.code == "wrong_model"
    node.answer_aborts()
    assert not node.step()
    assert node.held() == {}


@pytest.mark.parametrize("alone", [True, False])
def test_a_context_that_is_too_long_is_refused_and_no_error(alone: bool) -> None:
    node, job = Node(num_blocks=300), work([1] * 4096, max_tokens=1)
    node.tell(Prefill(job, alone=alone))
    (refused,) = node.take("refused")
    assert (refused.needed, refused.free) == (301, 300)
    assert node.take("failed") == []
    node.answer_aborts()
    assert node.held() == {}


def test_room_for_the_output_is_no_matter_of_the_prefill_node() -> None:
    node = Node()
    node.tell(Prefill(work([1, 2, 3], max_tokens=5000), alone=False))
    assert node.take("refused") == node.take("failed") == []


def test_a_repeated_message_changes_nothing() -> None:
    node, job = Node(), work(range(1, 151))
    node.tell(Prefill(job, alone=False))
    node.step()
    node.tell(Prefill(job, alone=False))
    while node.step():
        pass
    assert len(node.take("prefill_ended")) == 1
    node.tell(Committed(job.key, REPORT))
    node.tell(Committed(job.key, REPORT))
    assert len(node.take("handed_off")) == 1
    assert node.held() == {}
