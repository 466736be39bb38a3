"""Planes keep little of ended hand-offs, and not more with each of them."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ChecksumMismatch, HandoffFailed, StaleMessage
from baton.types import Incarnation
from kv_transfer.kv_receiver import KVReceiver
from kv_transfer.kv_sender import KVSender
from kv_transfer.plane import SealInfo
from kv_transfer.sender_loop import SenderLoop
from kv_transfer.transports.grpc_decode_link import GrpcDecodeLink
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from tests.contract.transfer_pair import (
    BACKENDS,
    FAST_SETTINGS,
    TOKEN,
    TransferPair,
    transfer_pair,
    wait_until,
)


def _sender_loop(pair: TransferPair) -> SenderLoop:
    assert isinstance(pair.outbound, KVSender)
    return pair.outbound._loop


def _decode_rejoins(pair: TransferPair, incarnation: Incarnation) -> None:
    pair.inbound.rejoin(incarnation)
    pair.decode_address = replace(pair.decode_address, incarnation=incarnation)
    pair.segment = replace(pair.segment, incarnation=incarnation)


def _writer_rejoins(pair: TransferPair, incarnation: Incarnation) -> None:
    pair.outbound.rejoin(incarnation)
    pair.writer_incarnation = incarnation


@contextmanager
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", BACKENDS)
def test_links_to_earlier_incarnations_are_closed(backend: str, tmp_path: Path) -> None:
    """A restarted coordinator gives out new incarnations and reports no old one as gone."""
    with transfer_pair(backend, tmp_path) as pair:
        pair.check_full_handoff()
        for number in range(3):
            _decode_rejoins(pair, Incarnation(f"decode {number}"))
            _writer_rejoins(pair, Incarnation(f"writer {number}"))
            pair.check_full_handoff()
        peers = [peer for peer, _ in _sender_loop(pair)._links.items()]
        assert [incarnation for _, incarnation in peers] == ["decode 2"]


def test_link_in_use_is_not_closed(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, [3, 4])
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1, 2], layers=[0])
        assert pair.outbound.wait_for_layer(key, 0, timeout=30)
        links = _sender_loop(pair)._links
        used = links.get((pair.decode_address.transfer_endpoint, pair.decode_address.incarnation))
        other = pair.open_handoff(2)
        later = replace(pair.decode_address, incarnation=Incarnation("later"))
        pair.outbound.set_ticket(other, replace(pair.make_ticket(other, [5, 6]), decode_peer=later))
        pair.outbound.abort_handoff(other, HandoffFailed("no"))
        pair.expect_aborted(other, HandoffFailed)
        pair.announce_layers(key, [1, 2], layers=[1, 2])
        pair.outbound.seal_handoff(key, SealInfo((17,)))
        pair.finish_handoff(ticket)
        assert (
            used
            is links.get((pair.decode_address.transfer_endpoint, pair.decode_address.incarnation))
            is not None
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rejected_ticket_is_not_stored(backend: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        key = pair.open_handoff(2)
        pair.outbound.set_ticket(key, pair.make_ticket(key, [3, 4, 5]))
        pair.expect_aborted(key, StaleMessage)
        assert not _sender_loop(pair)._keys_by_ticket
        pair.check_full_handoff()


@pytest.mark.parametrize(
    "point", ["transfer.write.before", "transfer.write.after", "transfer.seal.before"]
)
def test_a_failed_write_does_not_keep_the_peers_arena_mapped(point: str, tmp_path: Path) -> None:
    """The traceback of a kept error would keep the arena mapped until the garbage collector runs.

    The peer's next incarnation has the same arena, which could not be mapped then."""
    with (
        _no_garbage_collector(),
        transfer_pair("shm", tmp_path, failpoints=f"{point}=error*1") as pair,
    ):
        key, ticket = pair.start_handoff([1, 2], [3, 4])
        pair.expect_aborted(key, HandoffFailed)
        pair.expect_lost(ticket, HandoffFailed)
        former = pair.decode_address.incarnation
        _decode_rejoins(pair, Incarnation("anew"))
        pair.outbound.on_peer_gone(former)
        pair.check_full_handoff()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ended_ticket_keeps_no_block_offsets(backend: str, tmp_path: Path) -> None:
    """Ended tickets are remembered for late frames; each may cover the longest prompt."""
    with transfer_pair(backend, tmp_path) as pair:
        pair.check_full_handoff()
        _, ticket = pair.start_handoff([1, 2], [3, 4])
        pair.inbound.revoke_ticket(ticket.id, HandoffFailed("no"))
        assert isinstance(pair.inbound, KVReceiver)
        ended = pair.inbound._loop._ended_handoffs
        wait_until(lambda: len(ended) == 2)
        assert [
            (machine.ticket.block_offsets, machine.landed_slabs, machine.seal_info)
            for machine in ended.values()
        ] == [((), 0, None)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_failures_of_one_write_lose_its_ticket_once(backend: str, tmp_path: Path) -> None:
    points = "transfer.land.before=corrupt*1;transfer.land.after=error*1"
    with transfer_pair(backend, tmp_path, failpoints=points) as pair:
        key, ticket = pair.start_handoff([1, 2], [3, 4])
        pair.expect_lost_and_fenced(ticket, ChecksumMismatch)
        pair.expect_aborted(key, ChecksumMismatch)
        assert pair.decode_events.drain_unexpected() == []
        pair.check_full_handoff()


def test_a_grpc_link_that_is_closed_keeps_no_thread() -> None:
    """Also while it is referenced. Threads that answer would keep the process from ending."""
    before = set(threading.enumerate())
    decode = GrpcDecodeLink(TOKEN, FAST_SETTINGS)
    writers = [GrpcDialer(TOKEN, FAST_SETTINGS).dial(decode.endpoint) for _ in range(3)]
    for writer in writers:
        writer.send(b"frame")
        wait_until(lambda: decode.receive() is not None)
    writers[0].close()
    decode.close()
    wait_until(lambda: all(thread.daemon for thread in set(threading.enumerate()) - before))
    wait_until(lambda: all(writer.get_loss() is not None for writer in writers[1:]))
    for writer in writers[1:]:
        writer.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
