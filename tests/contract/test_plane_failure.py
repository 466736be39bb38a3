"""A plane whose thread has died says so: a node that went on without it would fail every hand-off, for ever."""

from pathlib import Path

import pytest

from baton.errors import PeerGone
from baton.types import Incarnation
from kv_transfer.plane import Aborted, Committed, Lost, PlaneFailed, Sealed, SealInfo, Started
from tests.contract.rig import rig


def broken(*_: object) -> None:
    raise ZeroDivisionError("a defect")


def test_prefill_ends_every_hand_off_and_then_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("memory", tmp_path) as pair:
        key = pair.key()
        pair.outbound.open(key, 4)
        monkeypatch.setattr(pair.outbound, "_peer_gone", broken)
        pair.outbound.peer_gone(pair.decode.incarnation)
        pair.prefill_events.expect(Aborted)
        pair.prefill_events.expect(PlaneFailed)


def test_decode_ends_every_ticket_and_then_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("memory", tmp_path) as pair:
        ticket = pair.ticket(pair.key(), [5])
        pair.inbound.grant(ticket)
        monkeypatch.setattr(pair.inbound, "_peer_gone", broken)
        pair.inbound.peer_gone(pair.writer)
        pair.decode_events.expect(Lost)
        pair.decode_events.expect(PlaneFailed)


def test_a_plane_that_is_closed_has_not_failed(tmp_path: Path) -> None:
    with rig("memory", tmp_path) as pair:
        pair.outbound.close()
        pair.inbound.close()
        assert pair.prefill_events.empty()
        assert pair.decode_events.empty()


def test_a_peer_that_is_gone_may_leave_several_hand_offs_in_one_arena(tmp_path: Path) -> None:
    """Its arena is let go when the last of them has dropped its lock; those of its next incarnation keep theirs."""
    with rig("shm", tmp_path) as pair:
        keys = [pair.key() for _ in range(3)]
        for block, key in enumerate(keys):
            pair.outbound.open(key, 8)
            ticket = pair.ticket(key, [2 * block, 2 * block + 1])
            pair.inbound.grant(ticket)
            pair.outbound.ticket(key, ticket)
            for layer in range(pair.layout.num_layers):
                pair.outbound.layer_ready(key, layer, 0, [block])  # one block of two: the lock is held
            pair.decode_events.expect(Started)
        pair.outbound.peer_gone(Incarnation("somebody else"))
        pair.outbound.peer_gone(pair.decode.incarnation)
        for _ in keys:
            aborted = pair.prefill_events.expect(Aborted)
            assert isinstance(aborted, Aborted)
            assert isinstance(aborted.error, PeerGone)
        assert pair.prefill_events.empty()
        for _ in keys:
            pair.decode_events.expect(Lost)
        key = pair.key()  # and the arena is mapped again when it is needed again
        pair.outbound.open(key, 4)
        ticket = pair.ticket(key, [9])
        pair.inbound.grant(ticket)
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1])
        pair.outbound.seal(key, SealInfo((1,)))
        sealed = pair.decode_events.expect(Sealed)
        assert isinstance(sealed, Sealed)
        assert pair.landed_equals_sent([1], [9])
        pair.inbound.commit(sealed.ticket)
        pair.prefill_events.expect(Committed)
