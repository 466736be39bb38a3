"""The memory-bound role with everything real but the plane: tickets, commits, and every end of every attempt."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.errors import Cancelled, ChecksumMismatch, LeaseExpired
from baton.types import Incarnation, PeerAddress, Ticket, TicketId, Work
from decode_node.role import DecodeRole
from kv_transfer.plane import Fenced, Lost, Sealed, SealInfo, Started
from node_engine.core.ledger import BlockState
from node_engine.core.messages import Cancel, CoordinatorLost, Joined, PeerGone, Submit
from node_engine.core.sequence import SequenceState
from node_engine.core.step import SampleSpec, SequenceId, Slice, StepBatch
from node_engine.paced import FREE_OF_COST, PACED_LAYOUT, PacedEngine, paced_reference
from tests.unit.roles.bench import INCARNATION, WRITER, Bench, FakeInbound, tokens_of, work

PROMPT = tuple(range(1, 41))  # 40 tokens: 2.5 blocks


class Node(Bench):
    def __init__(self, **sizes: int) -> None:
        self.plane = FakeInbound()
        super().__init__(lambda parts: DecodeRole(parts, self.plane), **sizes)

    @property
    def ticket(self) -> Ticket:
        (ticket,) = [each for each in self.plane.granted.values() if each.id not in self.plane.committed]
        return ticket

    def land(self, ticket: Ticket, job: Work) -> None:
        """Put into the ticket's blocks what a writer would have: computed by an engine of its own."""
        context = job.context
        count = PACED_LAYOUT.blocks_for(len(context))
        writer, arena = PacedEngine(FREE_OF_COST, vocab_size=1000), bytearray(count * PACED_LAYOUT.block_bytes)
        writer.bind(memoryview(arena), count)
        spec = SampleSpec(job.request.sampling, 0, len(context))
        writer.run(StepBatch((Slice(SequenceId(0), context, 0, tuple(range(count)), spec),)))  # type: ignore[arg-type]
        size = PACED_LAYOUT.block_bytes
        for number, offset in enumerate(ticket.offsets, ticket.first_block):
            self.arena[offset : offset + size] = arena[number * size : (number + 1) * size]

    def lose_revoked(self) -> None:
        for ticket, error in tuple(self.plane.revoked.items()):
            if ticket not in self.plane.committed:
                self.tell(Lost(ticket, error, fenced=True))
        self.plane.revoked.clear()


def seal(job: Work) -> SealInfo:
    return SealInfo((*job.emitted, *paced_reference(job.context, 1, 1000)))


def run(node: Node, job: Work) -> list[int]:
    """Step to the end; the tokens in order, their indexes checked."""
    while node.step():
        pass
    pairs = [pair for message in node.take("tokens") for pair in tokens_of(message)]
    assert [index for index, _ in pairs] == list(range(len(job.emitted), len(job.emitted) + len(pairs)))
    return [token for _, token in pairs]


def hand_over(node: Node, job: Work) -> None:
    node.tell(Submit(job, WRITER))
    ticket = node.ticket
    node.tell(Started(ticket.id))
    node.land(ticket, job)
    node.tell(Sealed(ticket.id, seal(job), 1))


def test_a_hand_off_and_the_tokens_after_it() -> None:
    node, job = Node(), work(PROMPT, max_tokens=30)
    hand_over(node, job)
    assert node.plane.committed == [node.plane.granted.popitem()[0]]
    reserved, admitted = node.take("reserved")[0], node.take("admitted")[0]
    assert reserved.ticket.num_tokens == 40
    assert (len(reserved.ticket.offsets), reserved.held_tokens) == (3, 0)
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (0, 0, 40)
    assert run(node, job) == paced_reference(PROMPT, 30, 1000)
    assert node.held() == {}
    assert node.sent == []


def test_only_what_is_lacking_is_asked_for() -> None:
    node = Node()
    hand_over(node, work(PROMPT, request="a"))
    run(node, work(PROMPT))
    node.sent.clear()
    job = work((*PROMPT[:32], 900, 901), request="b")
    hand_over(node, job)
    reserved = node.take("reserved")[0]
    assert (reserved.held_tokens, reserved.ticket.first_block, len(reserved.ticket.offsets)) == (32, 2, 1)
    assert run(node, job) == paced_reference(job.request.prompt, 4, 1000)


def test_a_full_hit_computes_its_last_token_here() -> None:
    node = Node()
    whole = tuple(range(1, 33))
    hand_over(node, work(whole, request="a"))
    run(node, work(whole))
    node.sent.clear()
    job = work(whole, request="b")
    node.tell(Submit(job, WRITER))
    assert not node.take("reserved")[0].HasField("ticket")
    assert run(node, job) == paced_reference(whole, 4, 1000)
    admitted = node.take("admitted")[0]
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (1, 31, 0)
    assert node.held() == {}


@pytest.mark.parametrize("writer", [None, WRITER])
@pytest.mark.parametrize("bound_to", [b"", b"x" * 32])
def test_a_request_that_is_bound_to_another_model_is_not_continued(writer: PeerAddress | None, bound_to: bytes) -> None:
    node, job = Node(), replace(work([1, 2, 3], emitted=(4,)), model=bound_to)
    node.tell(Submit(job, writer))
    assert node.take("failed")[0].error.code == "wrong_model"
    assert not node.step()
    assert node.held() == {}


@pytest.mark.parametrize("writer", [None, WRITER])
def test_a_request_that_is_too_long_is_refused_and_no_error(writer: PeerAddress | None) -> None:
    node, job = Node(), work(range(1, 101), max_tokens=4096)
    node.tell(Submit(job, writer))
    (refused,) = node.take("refused")
    assert (refused.needed, refused.free) == (33, 32)
    assert node.take("failed") == []
    assert node.held() == {}


def test_colocated() -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, None))
    assert run(node, job) == paced_reference(PROMPT, 4, 1000)
    assert node.take("admitted")[0].computed_tokens == 40


def test_a_resumed_attempt_goes_on_where_the_client_is() -> None:
    node = Node()
    everything = paced_reference(PROMPT, 10, 1000)
    job = work(PROMPT, max_tokens=10, emitted=everything[:6], attempt=3)
    hand_over(node, job)
    assert run(node, job) == everything[6:]


def test_no_room_is_said_at_once_and_holds_nothing() -> None:
    node = Node(num_blocks=4)
    node.tell(Submit(work(PROMPT, request="a"), WRITER))
    node.tell(Submit(work((7, *PROMPT), request="b"), WRITER))
    refused = node.take("refused")[0]
    assert (refused.needed, refused.free) == (3, 1)
    node.tell(Submit(work((7, *PROMPT), request="c"), None))
    assert node.take("refused")[0].needed == 3
    assert node.held() == {BlockState.RESERVED: 3}


def drive_waiting(node: Node, job: Work) -> None:
    node.tell(Submit(job, None))


def drive_prefilling(node: Node, job: Work) -> None:
    node.tell(Submit(job, None))
    node.step()


def drive_awaiting_kv(node: Node, job: Work) -> None:
    node.tell(Submit(job, WRITER))
    node.tell(Started(node.ticket.id))


def drive_running(node: Node, job: Work) -> None:
    hand_over(node, job)
    node.step()


DRIVE: dict[SequenceState, Callable[[Node, Work], None] | None] = {
    SequenceState.WAITING: drive_waiting,
    SequenceState.PREFILLING: drive_prefilling,
    SequenceState.HANDING_OFF: None,  # prefill's
    SequenceState.AWAITING_KV: drive_awaiting_kv,
    SequenceState.RUNNING: drive_running,
    SequenceState.FINISHED: None,  # nothing is left to end
}
ENDS: dict[str, Callable[[Node, Work], None]] = {
    "cancel": lambda node, job: node.tell(Cancel(job.key, Cancelled("client gone"))),
    "coordinator lost": lambda node, job: node.tell(CoordinatorLost()),
    "joined anew": lambda node, job: node.tell(Joined(Incarnation("again"))),
}


def test_every_state_is_covered() -> None:
    assert set(DRIVE) == set(SequenceState)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", [state for state, drive in DRIVE.items() if drive], ids=lambda state: state.value)
def test_every_end_in_every_state_returns_every_block(state: SequenceState, end: str) -> None:
    node, job = Node(max_batched_tokens=32), work(PROMPT, max_tokens=100)
    drive = DRIVE[state]
    assert drive is not None
    drive(node, job)
    node.sent.clear()
    ENDS[end](node, job)
    assert not node.step()
    node.lose_revoked()
    assert node.held() == {}
    assert node.role.holding == 0
    assert node.sent == []


def test_a_lost_hand_off_is_reported_once_and_its_blocks_return() -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    node.tell(Lost(node.ticket.id, ChecksumMismatch("layer 2"), fenced=True))
    assert [failed.error.code for failed in node.take("failed")] == ["checksum_mismatch"]
    assert node.held() == {}


def test_blocks_of_an_unfenced_writer_stay_quarantined() -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    ticket = node.ticket.id
    node.tell(Started(ticket))
    node.tell(Lost(ticket, LeaseExpired("10 s"), fenced=False))
    assert node.held() == {BlockState.QUARANTINED: 3}
    assert node.take("failed")[0].error.code == "lease_expired"
    node.tell(Fenced(ticket))
    assert node.held() == {}


@pytest.mark.parametrize("emitted", [(), (5, 6), (1000,), (-1,)], ids=["none", "two", "out of range", "negative"])
def test_a_seal_that_does_not_continue_the_attempt_is_not_committed(emitted: tuple[int, ...]) -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    ticket = node.ticket.id
    node.tell(Started(ticket))
    node.tell(Sealed(ticket, SealInfo(emitted), 1))
    assert node.plane.committed == []
    node.lose_revoked()
    assert node.take("failed")[0].error.code == "incomplete"
    assert node.held() == {}


def test_a_seal_that_crosses_its_cancel_is_ignored() -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    ticket = node.ticket.id
    node.tell(Cancel(job.key, Cancelled("client gone")))
    node.tell(Started(ticket))
    node.tell(Sealed(ticket, seal(job), 1))
    node.lose_revoked()
    assert node.plane.committed == []
    assert node.held() == {}
    assert node.take("failed") == []


def test_corrupted_kv_would_give_another_token() -> None:
    """The paced engine reads the KV itself: that the tests above see the right tokens proves the right bytes."""
    node, job = Node(), work(PROMPT, max_tokens=3)
    node.tell(Submit(job, WRITER))
    ticket = node.ticket
    node.tell(Started(ticket.id))
    node.land(ticket, job)
    node.arena[ticket.offsets[1] + 5] ^= 1
    node.tell(Sealed(ticket.id, seal(job), 1))
    assert run(node, job) != paced_reference(PROMPT, 3, 1000)


def test_a_gone_writer_is_passed_to_the_plane() -> None:
    node = Node()
    node.tell(PeerGone(Incarnation("writer")))
    assert node.plane.gone == [Incarnation("writer")]
    assert node.plane.incarnation == INCARNATION
    assert TicketId("x") not in node.plane.granted


def test_a_repeated_message_changes_nothing() -> None:
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    node.tell(Submit(job, WRITER))
    assert len(node.plane.granted) == 1
    ticket = node.ticket
    node.tell(Started(ticket.id))
    node.land(ticket, job)
    node.tell(Sealed(ticket.id, seal(job), 1))
    node.tell(Submit(job, WRITER))
    assert run(node, job) == paced_reference(PROMPT, 4, 1000)
    assert node.held() == {}


def test_a_writer_that_needs_us_no_more_is_no_failure() -> None:
    """The first token may end a request: prefill answers it, and its word must not race with one of ours."""
    node, job = Node(), work(PROMPT)
    node.tell(Submit(job, WRITER))
    node.take("reserved")
    node.tell(Lost(node.ticket.id, Cancelled("the first token ends the request"), fenced=True))
    assert node.held() == {}
    assert node.sent == []
