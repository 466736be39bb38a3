"""The memory-bound role with everything real but the plane: tickets, commits, and every end of
every attempt."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PeerLostNotice
from baton.errors import Cancelled, ChecksumMismatch, LeaseExpired, NodeFailed
from baton.types import AttemptSpec, Incarnation, PeerAddress, TicketId
from kv_transfer.plane import InboundFenced, InboundLost, InboundSealed, InboundStarted, SealInfo
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.node_commands import CoordinatorLost, NodeJoined
from node_engine.core.sequences.sequence import SequenceState
from tests.paced_reference import paced_reference_tokens
from tests.pool.in_process_nodes import InProcessHost
from tests.unit.node_roles.decode_bench import (
    DecodeBench,
    hand_over,
    make_seal,
    run,
)
from tests.unit.node_roles.role_bench import (
    INCARNATION,
    STEP_SECONDS,
    WRITER,
    make_work,
)

PROMPT = tuple(range(1, 41))  # 40 tokens: 2.5 blocks


def test_a_hand_off_and_the_tokens_after_it() -> None:
    node, work = DecodeBench(), make_work(PROMPT, max_tokens=30)
    hand_over(node, work)
    assert node.plane.committed == [node.plane.granted.popitem()[0]]
    reserved, admitted = node.pop_messages("reserved")[0], node.pop_messages("admitted")[0]
    assert reserved.ticket.num_tokens == 40
    assert (len(reserved.ticket.offsets), reserved.held_tokens) == (3, 0)
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (
        0,
        0,
        40,
    )
    assert run(node, work) == paced_reference_tokens(PROMPT, 30, 1000)
    assert node.count_held_blocks() == {}
    assert node.sent_messages == []


def test_ticket_covers_only_missing_blocks() -> None:
    node = DecodeBench()
    hand_over(node, make_work(PROMPT, request="a"))
    run(node, make_work(PROMPT))
    node.sent_messages.clear()
    work = make_work((*PROMPT[:32], 900, 901), request="b")
    hand_over(node, work)
    reserved = node.pop_messages("reserved")[0]
    assert (reserved.held_tokens, reserved.ticket.first_block, len(reserved.ticket.offsets)) == (
        32,
        2,
        1,
    )
    assert run(node, work) == paced_reference_tokens(work.request.prompt_token_ids, 4, 1000)


def test_a_full_hit_computes_its_last_token_here() -> None:
    node = DecodeBench()
    whole = tuple(range(1, 33))
    hand_over(node, make_work(whole, request="a"))
    run(node, make_work(whole))
    node.sent_messages.clear()
    work = make_work(whole, request="b")
    node.send_item(DecodeOrder(work, WRITER))
    assert not node.pop_messages("reserved")[0].HasField("ticket")
    assert run(node, work) == paced_reference_tokens(whole, 4, 1000)
    admitted = node.pop_messages("admitted")[0]
    assert (admitted.computed_tokens, admitted.cached_tokens, admitted.received_tokens) == (
        1,
        31,
        0,
    )
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize("writer", [None, WRITER])
@pytest.mark.parametrize("bound_to", [b"", b"x" * 32])
def test_a_request_that_is_bound_to_another_model_is_not_continued(
    writer: PeerAddress | None, bound_to: bytes
) -> None:
    node, work = (
        DecodeBench(),
        replace(make_work([1, 2, 3], emitted=(4,)), identity_digest=bound_to),
    )
    node.send_item(DecodeOrder(work, writer))
    assert node.pop_messages("failed")[0].error.code == "wrong_model"
    assert not node.step()
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize("writer", [None, WRITER])
def test_a_request_that_is_too_long_is_refused_and_no_error(writer: PeerAddress | None) -> None:
    node, work = DecodeBench(), make_work(range(1, 101), max_tokens=4096)
    node.send_item(DecodeOrder(work, writer))
    (refused,) = node.pop_messages("refused")
    assert (refused.needed, refused.free) == (33, 32)
    assert node.pop_messages("failed") == []
    assert node.count_held_blocks() == {}


def test_colocated() -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, None))
    assert run(node, work) == paced_reference_tokens(PROMPT, 4, 1000)
    assert node.pop_messages("admitted")[0].computed_tokens == 40


def test_time_of_a_local_prefill_is_reported() -> None:
    node, work = DecodeBench(max_batched_tokens=32), make_work(PROMPT)
    node.send_item(DecodeOrder(work, None))
    run(node, work)
    (admitted,) = node.pop_messages("admitted")
    assert admitted.share_seconds == 2 * STEP_SECONDS, "all of two steps"


def fail_to_save(_: object) -> Future[None]:
    raise NodeFailed("no memory for the copy")


def save_in_vain(_: object) -> Future[None]:
    saved: Future[None] = Future()
    saved.set_exception(RuntimeError("the copy failed"))
    return saved


@pytest.mark.parametrize(
    ("owner", "method", "replacement"),
    [
        ("pool_connector", "_save_blocks", fail_to_save),
        ("pool_connector", "_save_blocks", save_in_vain),
        ("pool_client", "publish_blocks", lambda _: False),
    ],
    ids=["save refused", "save failed", "publication refused"],
)
def test_a_publication_that_does_not_begin_holds_no_blocks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    method: str,
    replacement: Callable[[object], object],
) -> None:
    """And it is not the last one of its sequence."""
    host = InProcessHost(tmp_path, prefill=0, decode=1, num_blocks=32)
    (node,), work = host.decode, make_work(PROMPT, max_tokens=30)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(node, owner), method, replacement)
        node.send_item(DecodeOrder(work, None))
        assert node.step()
        node.drain_inbox()
        (sequence,) = node.scheduler.sequences
        assert not sequence.is_publishing
    while node.step():
        pass
    host.run_publications()
    assert len(host.pool.block_pool.memory.index) == 4
    host.check()
    host.close()


def test_a_resumed_attempt_goes_on_where_the_client_is() -> None:
    node = DecodeBench()
    everything = paced_reference_tokens(PROMPT, 10, 1000)
    work = make_work(PROMPT, max_tokens=10, emitted=everything[:6], attempt=3)
    hand_over(node, work)
    assert run(node, work) == everything[6:]


def test_refusal_is_immediate_and_holds_nothing() -> None:
    node = DecodeBench(num_blocks=4)
    node.send_item(DecodeOrder(make_work(PROMPT, request="a"), WRITER))
    node.send_item(DecodeOrder(make_work((7, *PROMPT), request="b"), WRITER))
    refused = node.pop_messages("refused")[0]
    assert (refused.needed, refused.free) == (3, 1)
    node.send_item(DecodeOrder(make_work((7, *PROMPT), request="c"), None))
    assert node.pop_messages("refused")[0].needed == 3
    assert node.count_held_blocks() == {BlockState.RESERVED: 3}


def drive_waiting(node: DecodeBench, work: AttemptSpec) -> None:
    node.send_item(DecodeOrder(work, None))


def drive_prefilling(node: DecodeBench, work: AttemptSpec) -> None:
    node.send_item(DecodeOrder(work, None))
    node.step()


def drive_awaiting_kv(node: DecodeBench, work: AttemptSpec) -> None:
    node.send_item(DecodeOrder(work, WRITER))
    node.send_item(InboundStarted(node.ticket.id))


def drive_running(node: DecodeBench, work: AttemptSpec) -> None:
    hand_over(node, work)
    node.step()


DRIVERS_BY_STATE: dict[SequenceState, Callable[[DecodeBench, AttemptSpec], None] | None] = {
    SequenceState.WAITING: drive_waiting,
    SequenceState.PREFILLING: drive_prefilling,
    SequenceState.HANDING_OFF: None,  # prefill's
    SequenceState.AWAITING_KV: drive_awaiting_kv,
    SequenceState.RUNNING: drive_running,
    SequenceState.FINISHED: None,  # nothing is left to end
}
ENDS: dict[str, Callable[[DecodeBench, AttemptSpec], None]] = {
    "cancel": lambda node, work: node.send_item(CancelOrder(work.key, Cancelled("client gone"))),
    "coordinator lost": lambda node, work: node.send_item(CoordinatorLost()),
    "joined anew": lambda node, work: node.send_item(NodeJoined(Incarnation("again"))),
}


def test_every_state_is_covered() -> None:
    assert set(DRIVERS_BY_STATE) == set(SequenceState)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "state",
    [state for state, drive in DRIVERS_BY_STATE.items() if drive],
    ids=lambda state: state.value,
)
def test_every_end_in_every_state_returns_every_block(state: SequenceState, end: str) -> None:
    node, work = DecodeBench(max_batched_tokens=32), make_work(PROMPT, max_tokens=100)
    drive = DRIVERS_BY_STATE[state]
    assert drive is not None
    drive(node, work)
    node.sent_messages.clear()
    ENDS[end](node, work)
    assert not node.step()
    node.report_lost_tickets()
    assert node.count_held_blocks() == {}
    assert node.role.num_held_attempts == 0
    assert node.sent_messages == []


def test_a_lost_hand_off_is_reported_once_and_its_blocks_return() -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    node.send_item(InboundLost(node.ticket.id, ChecksumMismatch("layer 2"), is_fenced=True))
    assert [failed.error.code for failed in node.pop_messages("failed")] == ["checksum_mismatch"]
    assert node.count_held_blocks() == {}


def test_blocks_of_an_unfenced_writer_stay_quarantined() -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket.id
    node.send_item(InboundStarted(ticket))
    node.send_item(InboundLost(ticket, LeaseExpired("10 s"), is_fenced=False))
    assert node.count_held_blocks() == {BlockState.QUARANTINED: 3}
    assert node.pop_messages("failed")[0].error.code == "lease_expired"
    node.send_item(InboundFenced(ticket))
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize(
    "emitted", [(), (5, 6), (1000,), (-1,)], ids=["none", "two", "out of range", "negative"]
)
def test_a_seal_that_does_not_continue_the_attempt_is_not_committed(
    emitted: tuple[int, ...],
) -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket.id
    node.send_item(InboundStarted(ticket))
    node.send_item(InboundSealed(ticket, SealInfo(emitted), 1))
    assert node.plane.committed == []
    node.report_lost_tickets()
    assert node.pop_messages("failed")[0].error.code == "incomplete"
    assert node.count_held_blocks() == {}


@pytest.mark.parametrize(("transport", "loads"), [("shm", 1), ("cuda_ipc", 0)])
def test_only_what_landed_in_host_memory_is_loaded(
    transport: str, loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a peer's GPU has written is where the engine computes: a load would overwrite it."""
    node, work = DecodeBench(), make_work(PROMPT)
    node.plane.transport = transport
    loaded: list[object] = []
    monkeypatch.setattr(node.engine, "load_blocks", loaded.append)
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket
    node.send_item(InboundStarted(ticket.id))
    node.land_handoff(ticket, work)
    node.send_item(InboundSealed(ticket.id, make_seal(work), 1))
    assert node.plane.committed == [ticket.id]
    assert len(loaded) == loads


def test_a_seal_that_crosses_its_cancel_is_ignored() -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket.id
    node.send_item(CancelOrder(work.key, Cancelled("client gone")))
    node.send_item(InboundStarted(ticket))
    node.send_item(InboundSealed(ticket, make_seal(work), 1))
    node.report_lost_tickets()
    assert node.plane.committed == []
    assert node.count_held_blocks() == {}
    assert node.pop_messages("failed") == []


def test_corrupted_kv_would_give_another_token() -> None:
    """The paced engine reads the KV itself: that the tests above see the right tokens proves the
    right bytes."""
    node, work = DecodeBench(), make_work(PROMPT, max_tokens=3)
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket
    node.send_item(InboundStarted(ticket.id))
    node.land_handoff(ticket, work)
    node.arena[ticket.block_offsets[1] + 5] ^= 1
    node.send_item(InboundSealed(ticket.id, make_seal(work), 1))
    assert run(node, work) != paced_reference_tokens(PROMPT, 3, 1000)


def test_peer_gone_is_passed_to_the_plane() -> None:
    node = DecodeBench()
    node.send_item(PeerLostNotice(Incarnation("writer")))
    assert node.plane.gone == [Incarnation("writer")]
    assert node.plane.incarnation == INCARNATION
    assert TicketId("x") not in node.plane.granted


def test_repeated_command_changes_nothing() -> None:
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    node.send_item(DecodeOrder(work, WRITER))
    assert len(node.plane.granted) == 1
    ticket = node.ticket
    node.send_item(InboundStarted(ticket.id))
    node.land_handoff(ticket, work)
    node.send_item(InboundSealed(ticket.id, make_seal(work), 1))
    node.send_item(DecodeOrder(work, WRITER))
    assert run(node, work) == paced_reference_tokens(PROMPT, 4, 1000)
    assert node.count_held_blocks() == {}


def test_handoff_cancelled_by_its_writer_is_no_failure() -> None:
    """The first token may end a request: prefill answers it, and its word must not race with one of
    ours."""
    node, work = DecodeBench(), make_work(PROMPT)
    node.send_item(DecodeOrder(work, WRITER))
    node.pop_messages("reserved")
    node.send_item(
        InboundLost(node.ticket.id, Cancelled("the first token ends the request"), is_fenced=True)
    )
    assert node.count_held_blocks() == {}
    assert node.sent_messages == []
