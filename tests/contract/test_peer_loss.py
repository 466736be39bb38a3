"""The loss of a peer ends the hand-offs with that peer and no others."""

from pathlib import Path

import pytest

from baton.errors import PeerUnreachable
from baton.types import BlockIndex, Incarnation
from kv_transfer.plane import (
    InboundLost,
    InboundSealed,
    InboundStarted,
    OutboundAborted,
    OutboundCommitted,
    SealInfo,
)
from tests.contract.transfer_pair import ONE_SIDED, transfer_pair


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_lost_peer_with_several_handoffs_in_one_arena(backend: str, tmp_path: Path) -> None:
    """Its arena is unmapped when the last of them has ended, and can be mapped again."""
    with transfer_pair(backend, tmp_path) as pair:
        keys = [pair.new_key() for _ in range(3)]
        for block, key in enumerate(keys):
            pair.outbound.open_handoff(key, 8)
            ticket = pair.make_ticket(key, [2 * block, 2 * block + 1])
            pair.inbound.grant_ticket(ticket)
            pair.outbound.set_ticket(key, ticket)
            for layer in range(pair.layout.num_layers):
                # One block of two, so that the hand-off is not complete.
                pair.outbound.announce_layer(key, layer, 0, [BlockIndex(block)])
            pair.decode_events.expect_event(InboundStarted)
        pair.outbound.on_peer_gone(Incarnation("another"))
        pair.outbound.on_peer_gone(pair.decode_address.incarnation)
        for _ in keys:
            aborted = pair.prefill_events.expect_event(OutboundAborted)
            assert isinstance(aborted, OutboundAborted)
            assert isinstance(aborted.error, PeerUnreachable)
        assert pair.prefill_events.empty()
        for _ in keys:
            pair.decode_events.expect_event(InboundLost)
        key = pair.new_key()  # and the arena is mapped again when it is needed again
        pair.outbound.open_handoff(key, 4)
        ticket = pair.make_ticket(key, [9])
        pair.inbound.grant_ticket(ticket)
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1])
        pair.outbound.seal_handoff(key, SealInfo((1,)))
        sealed = pair.decode_events.expect_event(InboundSealed)
        assert isinstance(sealed, InboundSealed)
        assert pair.has_arrived([1], [9])
        pair.inbound.commit_ticket(sealed.ticket_id)
        pair.prefill_events.expect_event(OutboundCommitted)
