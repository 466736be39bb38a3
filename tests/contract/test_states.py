"""An end from either side in every state that either side can be in. The tables are keyed by the state enums, so that a
new state fails here until somebody has said how it is reached and what ends it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import Cancelled
from baton.types import AttemptKey, Ticket
from kv_transfer.core import frames
from kv_transfer.core.departure import DepartureState
from kv_transfer.core.landing import LandingState
from kv_transfer.core.slabs import Rectangle
from kv_transfer.plane import Aborted, Committed, Fenced, Lost, Sealed, SealInfo, Started
from tests.contract.raw_writer import RawWriter
from tests.contract.rig import BACKENDS, Rig, eventually, rig

WHY = Cancelled("the client left")
BLOCKS = [3, 4]

# prefill's side


def _speculative(pair: Rig, key: AttemptKey, ticket: Ticket) -> None:
    pair.announce(key, [1, 2], layers=[0])


def _streaming(pair: Rig, key: AttemptKey, ticket: Ticket) -> None:
    pair.outbound.ticket(key, ticket)
    pair.announce(key, [1, 2], layers=[0])
    assert pair.outbound.wait_landed(key, 0, timeout=30)


def _sealed_out(pair: Rig, key: AttemptKey, ticket: Ticket) -> None:
    _streaming(pair, key, ticket)
    pair.announce(key, [1, 2], layers=[1, 2])
    pair.outbound.seal(key, SealInfo((1,)))
    pair.decode_events.expect(Sealed)


def _committed_out(pair: Rig, key: AttemptKey, ticket: Ticket) -> None:
    _sealed_out(pair, key, ticket)
    pair.inbound.commit(ticket.id)
    pair.prefill_events.expect(Committed)


def _aborted_out(pair: Rig, key: AttemptKey, ticket: Ticket) -> None:
    _streaming(pair, key, ticket)
    pair.inbound.revoke(ticket.id, WHY)
    pair.decode_events.expect(Lost)
    pair.prefill_events.expect(Aborted)


OUTBOUND: dict[DepartureState, Callable[[Rig, AttemptKey, Ticket], None]] = {
    DepartureState.SPECULATIVE: _speculative,
    DepartureState.STREAMING: _streaming,
    DepartureState.SEALED: _sealed_out,
    DepartureState.COMMITTED: _committed_out,
    DepartureState.ABORTED: _aborted_out,
}
# This plane writes on the thread that hears the abort: no write is ever in flight when one comes. The exploration
# (tests/unit/transfer) covers the state.
UNSEEN_OUTBOUND = {DepartureState.ABORTING}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", DepartureState, ids=lambda state: state.value)
def test_the_writer_aborts(backend: str, state: DepartureState, tmp_path: Path) -> None:
    assert (state in OUTBOUND) != (state in UNSEEN_OUTBOUND)
    if state in UNSEEN_OUTBOUND:
        return
    with rig(backend, tmp_path) as pair:
        key = pair.opened(2)
        ticket = pair.granted(key, BLOCKS)
        OUTBOUND[state](pair, key, ticket)
        pair.outbound.abort(key, WHY)
        if state not in (DepartureState.COMMITTED, DepartureState.ABORTED):
            pair.aborted(key, Cancelled)
        if state is DepartureState.STREAMING:
            pair.lost(ticket, Cancelled)
        if state is DepartureState.SPECULATIVE:  # decode hears of it from the coordinator
            pair.inbound.revoke(ticket.id, WHY)
            pair.lost(ticket, Cancelled)
        if state is DepartureState.SEALED:  # a sealed ticket is decode's to decide
            pair.inbound.commit(ticket.id)
        pair.works()
        assert pair.decode_events.rest() == []
        assert pair.prefill_events.rest() == []


# decode's side


def _granted(pair: Rig, writer: RawWriter) -> None:
    writer.open()


def _writing(pair: Rig, writer: RawWriter) -> None:
    writer.open()
    writer.write(Rectangle(0, 1, 0, 2))
    assert isinstance(writer.answer(), frames.Landed)
    pair.decode_events.expect(Started)


def _sealing(pair: Rig, writer: RawWriter) -> None:
    """Only a writer that is wrong gets here: it seals while it holds its byte."""
    _writing(pair, writer)
    writer.write(Rectangle(1, 2, 0, 2))
    assert isinstance(writer.answer(), frames.Landed)
    assert writer.fences.take(writer.ticket.fence)
    writer.seal()
    eventually(lambda: pair.inbound.counters().get("fence_retries", 0) >= 1)


def _sealed(pair: Rig, writer: RawWriter) -> None:
    writer.open()
    writer.write_all()
    writer.seal()
    pair.decode_events.expect(Sealed)


def _committed(pair: Rig, writer: RawWriter) -> None:
    _sealed(pair, writer)
    pair.inbound.commit(writer.ticket.id)
    assert isinstance(writer.answer(), frames.Committed)


def _quarantined(pair: Rig, writer: RawWriter) -> None:
    _writing(pair, writer)
    assert writer.fences.take(writer.ticket.fence)
    pair.inbound.revoke(writer.ticket.id, WHY)
    pair.lost(writer.ticket, Cancelled, fenced=False)
    writer.refused("cancelled")


def _lost(pair: Rig, writer: RawWriter) -> None:
    _writing(pair, writer)
    pair.inbound.revoke(writer.ticket.id, WHY)
    pair.lost(writer.ticket, Cancelled)
    writer.refused("cancelled")


INBOUND: dict[LandingState, Callable[[Rig, RawWriter], None]] = {
    LandingState.GRANTED: _granted,
    LandingState.WRITING: _writing,
    LandingState.SEALING: _sealing,
    LandingState.SEALED: _sealed,
    LandingState.COMMITTED: _committed,
    LandingState.QUARANTINED: _quarantined,
    LandingState.LOST: _lost,
}
ONE_SIDED_ONLY = {LandingState.SEALING, LandingState.QUARANTINED}
# What an end does: Lost now (and then fenced or not), or nothing because it is over or not the asker's to decide.
LOST_BY_REVOKE = {LandingState.GRANTED, LandingState.WRITING, LandingState.SEALED, LandingState.SEALING}
LOST_BY_ABORT = LOST_BY_REVOKE - {LandingState.SEALED}
HELD = {LandingState.SEALING, LandingState.QUARANTINED}  # until the writer lets go of its byte


def _each() -> list[tuple[str, LandingState]]:
    return [
        (backend, state)
        for backend in BACKENDS
        for state in LandingState
        if backend == "shm" or state not in ONE_SIDED_ONLY
    ]


def test_every_state_of_decode_is_in_the_table() -> None:
    assert set(INBOUND) == set(LandingState)


@pytest.mark.parametrize(("backend", "state"), _each())
@pytest.mark.parametrize("how", ["revoke", "abort", "peer_gone"])
def test_decode_gives_up_or_is_told_to(backend: str, state: LandingState, how: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        ticket = pair.granted(pair.key(), BLOCKS)
        with RawWriter(pair, ticket) as writer:
            INBOUND[state](pair, writer)
            if how == "revoke":
                pair.inbound.revoke(ticket.id, WHY)
            elif how == "abort":
                writer.send(frames.Abort(*writer.ids, code="cancelled", message="the client left"))
            else:
                pair.inbound.peer_gone(ticket.writer)
            if state in (LOST_BY_REVOKE if how == "revoke" else LOST_BY_ABORT):
                lost = pair.decode_events.expect(Lost)
                assert (lost.ticket, lost.fenced) == (ticket.id, state not in HELD)
            if state in HELD:
                retries = pair.inbound.counters().get("fence_retries", 0)
                eventually(lambda: pair.inbound.counters().get("fence_retries", 0) >= retries + 3)
                assert pair.decode_events.rest() == []  # no message and no time frees the blocks
                writer.fences.drop(ticket.fence)
                assert pair.decode_events.expect(Fenced) == Fenced(ticket.id)
            if state is LandingState.SEALED and how != "revoke":
                pair.inbound.commit(ticket.id)
        pair.works()
        assert pair.decode_events.rest() == []


@pytest.mark.parametrize(("backend", "state"), _each())
def test_a_state_hears_every_frame_and_only_lives_on_rightly(backend: str, state: LandingState, tmp_path: Path) -> None:
    """Each frame of the union, out of place: the ticket ends at most once, and the next hand-off works."""
    with rig(backend, tmp_path) as pair:
        ticket = pair.granted(pair.key(), BLOCKS)
        with RawWriter(pair, ticket) as writer:
            INBOUND[state](pair, writer)
            again, payload = writer.write_frame(Rectangle(0, 1, 0, 2))
            writer.send(again, None if writer.one_sided else payload)
            writer.send(frames.Renew(*writer.ids))
            writer.seal()
            writer.send(frames.Open(*writer.ids, 1, pair.layout.num_layers, pair.layout.slab_bytes, 1, "x"))
            writer.send(frames.Abort(*writer.ids, code="cancelled", message=""))
            writer.fences.drop(ticket.fence)
            pair.inbound.revoke(ticket.id, WHY)
        pair.inbound.commit(ticket.id)
        if state in LOST_BY_REVOKE:
            held = not pair.decode_events.expect(Lost).fenced
        else:
            held = state in HELD
        if held:
            pair.decode_events.expect(Fenced)
        pair.works()
        assert pair.decode_events.rest() == []
