"""Between Sealed and the node's answer nobody else decides: the node may be committing at that very moment."""

from pathlib import Path

import pytest

from baton.errors import Cancelled, Stale
from kv_transfer.plane import Aborted, Committed, Lost, Sealed, SealInfo
from tests.contract.rig import BACKENDS, Rig, rig


def sealed(pair: Rig) -> Sealed:
    key = pair.key()
    pair.outbound.open(key, 4)
    ticket = pair.ticket(key, [5])
    pair.inbound.grant(ticket)
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1])
    pair.outbound.seal(key, SealInfo((17,)))
    event = pair.decode_events.expect(Sealed)
    assert isinstance(event, Sealed)
    return event


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_writer_that_is_gone_does_not_unseal(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        event = sealed(pair)
        pair.inbound.peer_gone(pair.writer)
        pair.inbound.commit(event.ticket)
        assert isinstance(pair.prefill_events.expect(Committed), Committed)
        assert pair.decode_events.empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_writer_that_gives_up_does_not_unseal(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        event = sealed(pair)
        pair.outbound.rejoin(pair.writer)  # aborts everything that is open
        pair.prefill_events.expect(Aborted)
        after = sealed(pair)  # its frames came after the Abort, which has been dealt with by now
        for one in (event, after):
            pair.inbound.commit(one.ticket)
        pair.prefill_events.expect(Committed)
        assert pair.decode_events.empty()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_node_may_still_revoke(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        event = sealed(pair)
        pair.inbound.revoke(event.ticket, Cancelled("the client has gone away"))
        lost = pair.decode_events.expect(Lost)
        assert isinstance(lost, Lost)
        assert lost.fenced
        pair.prefill_events.expect(Aborted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_incarnation_revokes_what_is_sealed(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        sealed(pair)
        pair.inbound.rejoin(pair.writer)
        lost = pair.decode_events.expect(Lost)
        assert isinstance(lost, Lost)
        assert isinstance(lost.error, Stale)
