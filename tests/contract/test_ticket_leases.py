"""How long a ticket is valid: it is renewed, expires, or is lost without progress."""

import queue
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import (
    Cancelled,
    HandoffFailed,
    LeaseExpired,
    StaleMessage,
)
from kv_transfer.plane import (
    OutboundAborted,
    SealInfo,
)
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    TransferPair,
    transfer_pair,
)


def test_a_ticket_is_kept_alive_while_its_work_is_queued(tmp_path: Path) -> None:
    """Nothing is ready to be written for longer than the lease: Renew alone keeps the ticket."""
    settings = replace(FAST_SETTINGS, ticket_ttl=2.0, renew_interval=0.1)
    with transfer_pair("zmq", tmp_path, settings=settings) as pair:
        key = pair.open_handoff(1)
        ticket = pair.grant_ticket(key, [3])
        pair.outbound.set_ticket(key, ticket)
        with pytest.raises(queue.Empty):
            pair.decode_events.get(timeout=2.5)
        pair.announce_layers(key, [1])
        pair.outbound.seal_handoff(key, SealInfo((1,)))
        pair.finish_handoff(ticket)


def test_a_ticket_that_nobody_renews_is_lost(backend: str, tmp_path: Path) -> None:
    silent = replace(FAST_SETTINGS, renew_interval=100.0)
    with transfer_pair(backend, tmp_path, outbound_settings=silent) as pair:
        pair.check_full_handoff()  # there is a link
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, [3, 4], ttl=1.0)
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1, 2], layers=[0])
        pair.expect_lost(ticket, LeaseExpired)
        pair.expect_aborted(key, LeaseExpired)
        pair.check_full_handoff()


def test_a_ticket_whose_writer_never_comes_is_lost(pair: TransferPair) -> None:
    ticket = pair.grant_ticket(pair.new_key(), [3], ttl=0.1)
    pair.expect_lost(ticket, LeaseExpired)


def test_handoff_without_progress_is_lost_even_if_renewed(backend: str, tmp_path: Path) -> None:
    settings = replace(FAST_SETTINGS, renew_interval=0.05, progress_timeout=0.3)
    with transfer_pair(
        backend, tmp_path, settings=settings, outbound_settings=FAST_SETTINGS
    ) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, [3, 4])
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1, 2], layers=[0])
        pair.expect_lost(ticket, HandoffFailed)
        pair.expect_aborted(key, HandoffFailed)


def test_late_writer_of_a_lost_ticket_is_refused(pair: TransferPair) -> None:
    key = pair.open_handoff(1)
    ticket = pair.grant_ticket(key, [3])
    pair.inbound.revoke_ticket(ticket.id, Cancelled("gone"))
    pair.expect_lost(ticket, Cancelled)
    pair.outbound.set_ticket(key, ticket)
    pair.announce_layers(key, [1])
    event = pair.prefill_events.expect_event(OutboundAborted)
    assert isinstance(event.error, Cancelled | StaleMessage)
    assert pair.is_untouched([3])
