"""A hand-off is ended by either side in every state of either side.

The tables are keyed by the state enums: a new state fails here until the tables say how to reach it
and what ends it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import Cancelled
from baton.types import AttemptKey, Ticket
from kv_transfer.core import frames
from kv_transfer.core.inbound_handoff import InboundState
from kv_transfer.core.outbound_handoff import OutboundState
from kv_transfer.core.slabs import SlabRange
from kv_transfer.plane import (
    InboundFenced,
    InboundLost,
    InboundSealed,
    InboundStarted,
    OutboundAborted,
    OutboundCommitted,
    SealInfo,
)
from tests.contract.raw_writer import RawWriter
from tests.contract.transfer_pair import (
    BACKENDS,
    ONE_SIDED,
    TransferPair,
    transfer_pair,
    wait_until,
)

REASON = Cancelled("the client left")
BLOCKS = [3, 4]

# prefill's side


def _to_unticketed(pair: TransferPair, key: AttemptKey, ticket: Ticket) -> None:
    pair.announce_layers(key, [1, 2], layers=[0])


def _to_streaming(pair: TransferPair, key: AttemptKey, ticket: Ticket) -> None:
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1, 2], layers=[0])
    assert pair.outbound.wait_for_layer(key, 0, timeout=30)


def _to_outbound_sealed(pair: TransferPair, key: AttemptKey, ticket: Ticket) -> None:
    _to_streaming(pair, key, ticket)
    pair.announce_layers(key, [1, 2], layers=[1, 2])
    pair.outbound.seal_handoff(key, SealInfo((1,)))
    pair.decode_events.expect_event(InboundSealed)


def _to_outbound_committed(pair: TransferPair, key: AttemptKey, ticket: Ticket) -> None:
    _to_outbound_sealed(pair, key, ticket)
    pair.inbound.commit_ticket(ticket.id)
    pair.prefill_events.expect_event(OutboundCommitted)


def _to_outbound_aborted(pair: TransferPair, key: AttemptKey, ticket: Ticket) -> None:
    _to_streaming(pair, key, ticket)
    pair.inbound.revoke_ticket(ticket.id, REASON)
    pair.decode_events.expect_event(InboundLost)
    pair.prefill_events.expect_event(OutboundAborted)


REACH_OUTBOUND_STATE: dict[OutboundState, Callable[[TransferPair, AttemptKey, Ticket], None]] = {
    OutboundState.UNTICKETED: _to_unticketed,
    OutboundState.STREAMING: _to_streaming,
    OutboundState.SEALED: _to_outbound_sealed,
    OutboundState.COMMITTED: _to_outbound_committed,
    OutboundState.ABORTED: _to_outbound_aborted,
}
# The plane writes on the thread that processes the abort, so no write is in flight then.
# The state space exploration (tests/unit/kv_transfer/model_checking) covers the state.
UNREACHABLE_OUTBOUND = {OutboundState.ABORTING}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", OutboundState, ids=lambda state: state.value)
def test_the_writer_aborts(backend: str, state: OutboundState, tmp_path: Path) -> None:
    assert (state in REACH_OUTBOUND_STATE) != (state in UNREACHABLE_OUTBOUND)
    if state in UNREACHABLE_OUTBOUND:
        return
    with transfer_pair(backend, tmp_path) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, BLOCKS)
        REACH_OUTBOUND_STATE[state](pair, key, ticket)
        pair.outbound.abort_handoff(key, REASON)
        if state not in (OutboundState.COMMITTED, OutboundState.ABORTED):
            pair.expect_aborted(key, Cancelled)
        if state is OutboundState.STREAMING:
            pair.expect_lost(ticket, Cancelled)
        if state is OutboundState.UNTICKETED:  # the coordinator tells decode
            pair.inbound.revoke_ticket(ticket.id, REASON)
            pair.expect_lost(ticket, Cancelled)
        if state is OutboundState.SEALED:  # only decode decides on a sealed ticket
            pair.inbound.commit_ticket(ticket.id)
        pair.check_full_handoff()
        assert pair.decode_events.drain_unexpected() == []
        assert pair.prefill_events.drain_unexpected() == []


# decode's side


def _to_granted(pair: TransferPair, writer: RawWriter) -> None:
    writer.send_open()


def _to_writing(pair: TransferPair, writer: RawWriter) -> None:
    writer.send_open()
    writer.send_write(SlabRange(0, 1, 0, 2))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    pair.decode_events.expect_event(InboundStarted)


def _to_sealing(pair: TransferPair, writer: RawWriter) -> None:
    """Reached only by a writer that breaks the protocol: it seals while it holds its fence byte."""
    _to_writing(pair, writer)
    writer.send_write(SlabRange(1, 2, 0, 2))
    assert isinstance(writer.receive_frame(), frames.LandedFrame)
    assert writer.fences.try_lock_byte(writer.ticket.fence_byte)
    writer.send_seal()
    wait_until(lambda: pair.inbound.counters().get("fence_retries", 0) >= 1)


def _to_sealed(pair: TransferPair, writer: RawWriter) -> None:
    writer.send_open()
    writer.send_all_writes()
    writer.send_seal()
    pair.decode_events.expect_event(InboundSealed)


def _to_committed(pair: TransferPair, writer: RawWriter) -> None:
    _to_sealed(pair, writer)
    pair.inbound.commit_ticket(writer.ticket.id)
    assert isinstance(writer.receive_frame(), frames.CommittedFrame)


def _to_quarantined(pair: TransferPair, writer: RawWriter) -> None:
    _to_writing(pair, writer)
    assert writer.fences.try_lock_byte(writer.ticket.fence_byte)
    pair.inbound.revoke_ticket(writer.ticket.id, REASON)
    pair.expect_lost(writer.ticket, Cancelled, fenced=False)
    writer.expect_refused("cancelled")


def _to_lost(pair: TransferPair, writer: RawWriter) -> None:
    _to_writing(pair, writer)
    pair.inbound.revoke_ticket(writer.ticket.id, REASON)
    pair.expect_lost(writer.ticket, Cancelled)
    writer.expect_refused("cancelled")


REACH_INBOUND_STATE: dict[InboundState, Callable[[TransferPair, RawWriter], None]] = {
    InboundState.GRANTED: _to_granted,
    InboundState.WRITING: _to_writing,
    InboundState.SEALING: _to_sealing,
    InboundState.SEALED: _to_sealed,
    InboundState.COMMITTED: _to_committed,
    InboundState.QUARANTINED: _to_quarantined,
    InboundState.LOST: _to_lost,
}
ONE_SIDED_ONLY = {InboundState.SEALING, InboundState.QUARANTINED}
# States in which an end loses the ticket at once, fenced or not. In the others it changes nothing.
LOST_BY_REVOKE = {
    InboundState.GRANTED,
    InboundState.WRITING,
    InboundState.SEALED,
    InboundState.SEALING,
}
LOST_BY_ABORT = LOST_BY_REVOKE - {InboundState.SEALED}
# Until the writer releases its fence byte.
AWAITING_FENCE = {InboundState.SEALING, InboundState.QUARANTINED}


def _backend_and_state() -> list[tuple[str, InboundState]]:
    return [
        (backend, state)
        for backend in BACKENDS
        for state in InboundState
        if backend in ONE_SIDED or state not in ONE_SIDED_ONLY
    ]


def test_every_state_of_decode_is_in_the_table() -> None:
    assert set(REACH_INBOUND_STATE) == set(InboundState)


@pytest.mark.parametrize(("backend", "state"), _backend_and_state())
@pytest.mark.parametrize("how", ["revoke", "abort", "peer_gone"])
def test_decode_revokes_or_hears_of_an_end(
    backend: str, state: InboundState, how: str, tmp_path: Path
) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
        with RawWriter(pair, ticket) as writer:
            REACH_INBOUND_STATE[state](pair, writer)
            if how == "revoke":
                pair.inbound.revoke_ticket(ticket.id, REASON)
            elif how == "abort":
                writer.send(
                    frames.AbortFrame(
                        *writer.frame_ids, code="cancelled", message="the client left"
                    )
                )
            else:
                pair.inbound.on_peer_gone(ticket.writer_incarnation)
            if state in (LOST_BY_REVOKE if how == "revoke" else LOST_BY_ABORT):
                lost = pair.decode_events.expect_event(InboundLost)
                assert (lost.ticket_id, lost.is_fenced) == (ticket.id, state not in AWAITING_FENCE)
            if state in AWAITING_FENCE:
                retries = pair.inbound.counters().get("fence_retries", 0)
                wait_until(lambda: pair.inbound.counters().get("fence_retries", 0) >= retries + 3)
                # No message and no time-out frees the blocks.
                assert pair.decode_events.drain_unexpected() == []
                writer.fences.unlock_byte(ticket.fence_byte)
                assert pair.decode_events.expect_event(InboundFenced) == InboundFenced(ticket.id)
            if state is InboundState.SEALED and how != "revoke":
                pair.inbound.commit_ticket(ticket.id)
        pair.check_full_handoff()
        assert pair.decode_events.drain_unexpected() == []


@pytest.mark.parametrize(("backend", "state"), _backend_and_state())
def test_every_frame_in_every_state(backend: str, state: InboundState, tmp_path: Path) -> None:
    """Frames out of order end the ticket at most once, and the next hand-off works."""
    with transfer_pair(backend, tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), BLOCKS)
        with RawWriter(pair, ticket) as writer:
            REACH_INBOUND_STATE[state](pair, writer)
            again, payload = writer.make_write_frame(SlabRange(0, 1, 0, 2))
            writer.send(again, None if writer.is_one_sided else payload)
            writer.send(frames.RenewFrame(*writer.frame_ids))
            writer.send_seal()
            writer.send(
                frames.OpenFrame(
                    *writer.frame_ids,
                    frames.PROTOCOL_VERSION,
                    pair.layout.num_layers,
                    pair.layout.slab_bytes,
                    window_bytes=1,
                    host_id="x",
                    writer_process=pair.writer_name,
                )
            )
            writer.send(frames.AbortFrame(*writer.frame_ids, code="cancelled", message=""))
            pair.inbound.revoke_ticket(ticket.id, REASON)
            is_quarantined = state in AWAITING_FENCE
            if state in LOST_BY_REVOKE:
                is_quarantined = not pair.decode_events.expect_event(InboundLost).is_fenced
            # Not before: a ticket that waits for its fence would be sealed.
            writer.fences.unlock_byte(ticket.fence_byte)
        pair.inbound.commit_ticket(ticket.id)
        if is_quarantined:
            pair.decode_events.expect_event(InboundFenced)
        pair.check_full_handoff()
        assert pair.decode_events.drain_unexpected() == []
