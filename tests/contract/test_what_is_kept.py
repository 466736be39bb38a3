"""What planes keep of hand-offs that are over: little, and no more with every one."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ChecksumMismatch, HandoffFailed, Stale
from baton.types import Incarnation
from kv_transfer.departures import Departures
from kv_transfer.grpc_decode_link import GrpcDecodeLink
from kv_transfer.grpc_writer_link import GrpcDialer
from kv_transfer.inbound_plane import InboundTransfer
from kv_transfer.outbound_plane import OutboundTransfer
from kv_transfer.plane import SealInfo
from tests.contract.rig import BACKENDS, QUICK, TOKEN, Rig, eventually, rig


def _departures(pair: Rig) -> Departures:
    assert isinstance(pair.outbound, OutboundTransfer)
    return pair.outbound._departures


def _decode_rejoins(pair: Rig, incarnation: Incarnation) -> None:
    pair.inbound.rejoin(incarnation)
    pair.decode = replace(pair.decode, incarnation=incarnation)
    pair.segment = replace(pair.segment, incarnation=incarnation)


def _writer_rejoins(pair: Rig, incarnation: Incarnation) -> None:
    pair.outbound.rejoin(incarnation)
    pair.writer = incarnation


@contextmanager
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_to_former_lives_do_not_pile_up(backend: str, tmp_path: Path) -> None:
    """A coordinator that is started again gives everybody a new life, and tells nobody that the old ones are over."""
    with rig(backend, tmp_path) as pair:
        pair.works()
        for number in range(3):
            _decode_rejoins(pair, Incarnation(f"decode {number}"))
            _writer_rejoins(pair, Incarnation(f"writer {number}"))
            pair.works()
        assert [peer for peer, _ in _departures(pair)._links.each()] == [(pair.decode.transfer_endpoint, "decode 2")]


def test_a_link_that_is_in_use_stays(tmp_path: Path) -> None:
    with rig("zmq", tmp_path) as pair:
        key = pair.opened(2)
        ticket = pair.granted(key, [3, 4])
        pair.outbound.ticket(key, ticket)
        pair.announce(key, [1, 2], layers=[0])
        assert pair.outbound.wait_landed(key, 0, timeout=30)
        links = _departures(pair)._links
        used = links.get((pair.decode.transfer_endpoint, pair.decode.incarnation))
        other = pair.opened(2)
        later = replace(pair.decode, incarnation=Incarnation("later"))
        pair.outbound.ticket(other, replace(pair.ticket(other, [5, 6]), decode=later))
        pair.outbound.abort(other, HandoffFailed("no"))
        pair.aborted(other, HandoffFailed)
        pair.announce(key, [1, 2], layers=[1, 2])
        pair.outbound.seal(key, SealInfo((17,)))
        pair.finish(ticket)
        assert used is links.get((pair.decode.transfer_endpoint, pair.decode.incarnation)) is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ticket_that_is_not_taken_is_not_remembered(backend: str, tmp_path: Path) -> None:
    with rig(backend, tmp_path) as pair:
        key = pair.opened(2)
        pair.outbound.ticket(key, pair.ticket(key, [3, 4, 5]))
        pair.aborted(key, Stale)
        assert not _departures(pair)._tickets
        pair.works()


@pytest.mark.parametrize("point", ["transfer.write.before", "transfer.write.after", "transfer.seal.before"])
def test_a_failed_write_does_not_keep_the_peers_arena_mapped(point: str, tmp_path: Path) -> None:
    """An error kept with its hand-off, and through its traceback the hand-off with the error, would keep it until the
    garbage collector comes; the next life of the peer has the same arena and could not be mapped."""
    with _no_garbage_collector(), rig("shm", tmp_path, failpoints=f"{point}=error*1") as pair:
        key, ticket = pair.hand_off([1, 2], [3, 4])
        pair.aborted(key, HandoffFailed)
        pair.lost(ticket, HandoffFailed)
        former = pair.decode.incarnation
        _decode_rejoins(pair, Incarnation("anew"))
        pair.outbound.peer_gone(former)
        pair.works()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ended_ticket_keeps_no_blocks(backend: str, tmp_path: Path) -> None:
    """Thousands are remembered for their late frames; each may be as long as the longest prompt."""
    with rig(backend, tmp_path) as pair:
        pair.works()
        _, ticket = pair.hand_off([1, 2], [3, 4])
        pair.inbound.revoke(ticket.id, HandoffFailed("no"))
        assert isinstance(pair.inbound, InboundTransfer)
        ended = pair.inbound._landings._ended
        eventually(lambda: len(ended) == 2)
        assert [(machine.ticket.offsets, machine.arrived, machine.seal_info) for machine in ended.values()] == [
            ((), 0, None)
        ] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_failures_of_one_write_lose_its_ticket_once(backend: str, tmp_path: Path) -> None:
    points = "transfer.land.before=corrupt*1;transfer.land.after=error*1"
    with rig(backend, tmp_path, failpoints=points) as pair:
        key, ticket = pair.hand_off([1, 2], [3, 4])
        pair.lost(ticket, ChecksumMismatch)
        pair.aborted(key, ChecksumMismatch)
        assert pair.decode_events.rest() == []
        pair.works()


def test_a_grpc_link_that_is_closed_keeps_no_thread() -> None:
    """Also while somebody still refers to it. The threads that answer are not daemons: the process could not end."""
    before = set(threading.enumerate())
    decode = GrpcDecodeLink(TOKEN, QUICK)
    writers = [GrpcDialer(TOKEN, QUICK).dial(decode.endpoint) for _ in range(3)]
    for writer in writers:
        writer.send(b"frame")
        eventually(lambda: decode.receive() is not None)
    writers[0].close()
    decode.close()
    eventually(lambda: all(each.daemon for each in set(threading.enumerate()) - before))
    eventually(lambda: all(writer.loss() is not None for writer in writers[1:]))
    for writer in writers[1:]:
        writer.close()
    eventually(lambda: set(threading.enumerate()) <= before)
