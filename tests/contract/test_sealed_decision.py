"""Only the node decides on a sealed ticket, because it may be committing at that moment."""

from pathlib import Path

import pytest

from baton.errors import Cancelled, StaleMessage
from kv_transfer.plane import (
    InboundLost,
    InboundSealed,
    OutboundAborted,
    OutboundCommitted,
    SealInfo,
)
from tests.contract.transfer_pair import BACKENDS, TransferPair, transfer_pair


def seal_one_handoff(pair: TransferPair) -> InboundSealed:
    key = pair.new_key()
    pair.outbound.open_handoff(key, 4)
    ticket = pair.make_ticket(key, [5])
    pair.inbound.grant_ticket(ticket)
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1])
    pair.outbound.seal_handoff(key, SealInfo((17,)))
    event = pair.decode_events.expect_event(InboundSealed)
    assert isinstance(event, InboundSealed)
    return event


@pytest.mark.parametrize("backend", BACKENDS)
def test_lost_writer_does_not_undo_sealed(backend: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        event = seal_one_handoff(pair)
        pair.inbound.on_peer_gone(pair.writer_incarnation)
        pair.inbound.commit_ticket(event.ticket_id)
        assert isinstance(pair.prefill_events.expect_event(OutboundCommitted), OutboundCommitted)
        assert pair.decode_events.empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_aborting_writer_does_not_undo_sealed(backend: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        event = seal_one_handoff(pair)
        pair.outbound.rejoin(pair.writer_incarnation)  # aborts everything that is open
        pair.prefill_events.expect_event(OutboundAborted)
        # Its frames came after the Abort, which decode has processed by now.
        later = seal_one_handoff(pair)
        for sealed in (event, later):
            pair.inbound.commit_ticket(sealed.ticket_id)
        pair.prefill_events.expect_event(OutboundCommitted)
        assert pair.decode_events.empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_node_may_still_revoke(backend: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        event = seal_one_handoff(pair)
        pair.inbound.revoke_ticket(event.ticket_id, Cancelled("the client has gone away"))
        lost = pair.decode_events.expect_event(InboundLost)
        assert isinstance(lost, InboundLost)
        assert lost.is_fenced
        pair.prefill_events.expect_event(OutboundAborted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_incarnation_revokes_what_is_sealed(backend: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        seal_one_handoff(pair)
        pair.inbound.rejoin(pair.writer_incarnation)
        lost = pair.decode_events.expect_event(InboundLost)
        assert isinstance(lost, InboundLost)
        assert isinstance(lost.error, StaleMessage)
