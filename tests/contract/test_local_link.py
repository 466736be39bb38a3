"""The link beside decode's segment: who may use it, what it bounds, and when writers do without."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import PeerUnreachable
from baton.shared_memory.segment import LINK_SUFFIX, remove_stale_segments
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.plane import InboundStarted
from kv_transfer.transports import local_link
from kv_transfer.transports.links import LinkLoss, LinkMessage, PeerLinks
from kv_transfer.transports.local_link import LocalDecodeLink, LocalDialer, LocalWriterLink
from tests.contract.transfer_pair import SEAL_INFO, TransferPair, transfer_pair, wait_until

SEGMENT = "baton-arena-" + "0" * 32


@dataclass
class LinkEnds:
    """Decode's link in a folder, and writers that dial it."""

    folder: Path
    decode: LocalDecodeLink
    dialer: LocalDialer
    writers: list[LocalWriterLink]

    def dial(self) -> LocalWriterLink:
        endpoint = self.dialer.find_endpoint(SEGMENT)
        assert endpoint
        writer = self.dialer.dial(endpoint)
        self.writers.append(writer)
        return writer

    def receive(self) -> LinkMessage:
        found: list[LinkMessage] = []

        def is_received() -> bool:
            message = self.decode.receive()
            found.extend([] if message is None else [message])
            return bool(found)

        wait_until(is_received)
        return found[0]

    def is_lost(self, writer: LocalWriterLink) -> bool:
        self.decode.receive()
        writer.receive()
        return writer.get_loss() is not None


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[LinkEnds]:
    found = LinkEnds(tmp_path, LocalDecodeLink(tmp_path / SEGMENT), LocalDialer(tmp_path), [])
    yield found
    for writer in found.writers:
        writer.close()
    found.decode.close()
    assert not list(tmp_path.iterdir())


def receive_by(read: Callable[[], bytes | None]) -> bytes:
    found: list[bytes] = []

    def is_received() -> bool:
        message = read()
        found.extend([] if message is None else [message])
        return bool(found)

    wait_until(is_received)
    return found[0]


def test_messages_travel_in_both_directions_in_their_order(ends: LinkEnds) -> None:
    writers = [ends.dial() for _ in range(3)]
    for number in range(5):
        for index, writer in enumerate(writers):
            assert writer.send(f"{index}/{number}".encode())
    received = [ends.receive() for _ in range(15)]
    routes = {message.header[:1]: message.reply_route for message in received}
    for index, writer in enumerate(writers):
        own = [message.header for message in received if message.header.startswith(b"%d" % index)]
        assert own == [f"{index}/{number}".encode() for number in range(5)]
        for number in range(4):
            assert ends.decode.send(routes[b"%d" % index], f"answer {number}".encode())
        answers = [receive_by(writer.receive) for _ in range(4)]
        assert answers == [f"answer {number}".encode() for number in range(4)]


def test_a_message_larger_than_the_sockets_buffers_is_sent_in_pieces(ends: LinkEnds) -> None:
    writer, message = ends.dial(), os.urandom(MAX_HEADER_BYTES)
    received: list[LinkMessage] = []
    turns = 0
    while not writer.send(message):
        turns += 1
        found = ends.decode.receive()
        received += [] if found is None else [found]
    assert turns > 0
    received = received or [ends.receive()]
    assert received[0].header == message
    assert writer.send(b"next")
    assert ends.receive().header == b"next"


def test_answers_wait_for_a_writer_that_does_not_read(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_link, "_MAX_QUEUED_ANSWERS", 3000)
    writer = ends.dial()
    assert writer.send(b"hello")
    route = ends.receive().reply_route
    sent = 0
    while ends.decode.send(route, sent.to_bytes(4, "big") * 100):
        sent += 1
    assert sent > 3000
    for number in range(sent):

        def read() -> bytes | None:
            ends.decode.receive()  # sends what waits
            return writer.receive()

        assert receive_by(read) == number.to_bytes(4, "big") * 100


def test_a_message_that_is_too_long_ends_its_connection_only(ends: LinkEnds) -> None:
    bad, good = ends.dial(), ends.dial()
    assert bad._stream is not None
    bad._stream.socket.sendall((MAX_HEADER_BYTES + 1).to_bytes(4, "little"))
    wait_until(lambda: ends.is_lost(bad))
    assert good.send(b"hello")
    assert ends.receive().header == b"hello"
    assert good.get_loss() is None


def test_decode_that_closes_is_a_loss(ends: LinkEnds) -> None:
    writer = ends.dial()
    assert writer.send(b"hello")
    assert ends.decode.send(ends.receive().reply_route, b"answer")
    assert receive_by(writer.receive) == b"answer"
    ends.decode.close()
    receive: Callable[[], object] = writer.receive
    wait_until(lambda: receive() is None and writer.get_loss() is not None)
    loss = writer.get_loss()
    assert loss is not None
    assert loss.was_up
    assert not writer.send(b"more")


def test_only_processes_of_this_user_are_served(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = (ends.folder / (SEGMENT + LINK_SUFFIX)).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        stranger = LocalWriterLink(ends.folder / (SEGMENT + LINK_SUFFIX))
        loss = stranger.get_loss()
        assert loss is not None
        assert "another user" in loss.error.message
        ends.decode.receive()  # accepts, and closes
    assert not ends.decode._connections
    stranger.close()


def test_the_number_of_connections_is_bounded(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_link, "_MAX_CONNECTIONS", 2)
    writers = [ends.dial() for _ in range(2)]
    for writer in writers:
        assert writer.send(b"hello")
        ends.receive()
    third = ends.dial()
    wait_until(lambda: ends.is_lost(third))
    loss = third.get_loss()
    assert loss is not None
    assert not loss.was_up
    assert ends.dialer.find_endpoint(SEGMENT) == ""  # this process uses the network link now
    writers[0].close()
    ends.decode.receive()
    ends.dialer = LocalDialer(ends.folder)
    fourth = ends.dial()
    assert fourth.send(b"hello")
    assert ends.receive().header == b"hello"


def test_without_descriptors_writers_use_the_network_from_then_on(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = ends.decode._listener

    class FullListener:
        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            listener.close()

        def accept(self) -> tuple[socket.socket, str]:
            raise OSError(24, "Too many open files")

    first, second = ends.dial(), ends.dial()
    assert first.send(b"hello")
    with monkeypatch.context() as patch:
        patch.setattr(ends.decode, "_listener", FullListener())
        ends.decode.receive()
    assert ends.dialer.find_endpoint(SEGMENT) == ""
    assert ends.decode._epoll.poll(0) == []  # nothing wakes the plane any more
    for waiting in (first, second):  # to be accepted
        waiting.receive()
        loss = waiting.get_loss()
        assert loss is not None
        assert not loss.was_up


@pytest.mark.parametrize("segment", ["", "baton-arena-x", "../" + SEGMENT, "elsewhere"])
def test_a_name_that_is_no_segments_has_no_link(segment: str, ends: LinkEnds) -> None:
    assert ends.dialer.find_endpoint(segment) == ""


def test_a_link_that_cannot_be_dialled_is_not_tried_again(ends: LinkEnds) -> None:
    path, endpoint = ends.folder / (SEGMENT + LINK_SUFFIX), ends.dialer.find_endpoint(SEGMENT)
    assert endpoint == f"unix://{SEGMENT}"
    ends.decode._listener.shutdown(socket.SHUT_RDWR)
    assert not ends.dialer.can_dial(endpoint)
    assert path.exists()
    assert ends.dialer.find_endpoint(SEGMENT) == ""
    loss = ends.dialer.dial(endpoint).get_loss()  # of a peer whose link was lost
    assert loss is not None
    assert not loss.was_up
    assert "refused" in loss.error.message.lower()


def test_a_link_is_dialled_once(ends: LinkEnds) -> None:
    endpoint = ends.dialer.find_endpoint(SEGMENT)
    assert all(ends.dialer.can_dial(endpoint) for _ in range(3))
    writer = ends.dialer.dial(endpoint)
    assert writer.send(b"hello")
    ends.receive()
    assert ends.decode.receive() is None
    assert len(ends.decode._connections) == 1
    writer.close()
    assert ends.dialer.can_dial(endpoint)  # one that nobody uses
    ends.dialer.close()


def test_without_descriptors_a_writer_finds_its_link_lost(
    ends: LinkEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(local_link, "_make_socket", refuse)
    writer = ends.dial()
    assert not writer.send(b"hello")
    assert writer.receive() is None
    assert writer.read_pollables() == ()
    loss = writer.get_loss()
    assert loss is not None
    assert "Too many open files" in loss.error.message


def test_the_socket_of_a_segment_that_is_gone_is_removed(tmp_path: Path) -> None:
    left = LocalDecodeLink(tmp_path / SEGMENT)
    try:
        assert remove_stale_segments(tmp_path) == [SEGMENT + LINK_SUFFIX]
    finally:
        left.close()


def _dialled(pair: TransferPair) -> list[str]:
    links: PeerLinks = pair.outbound._loop._links  # type: ignore[attr-defined]
    return [endpoint.partition("://")[0] for (endpoint, _), _ in links.items()]


def test_what_was_received_before_a_loss_is_not_lost(ends: LinkEnds) -> None:
    writer = ends.dial()
    assert writer.send(b"hello")
    route = ends.receive().reply_route
    for answer in (b"first", b"second"):
        assert ends.decode.send(route, answer)
    ends.decode.close()
    wait_until(lambda: not writer.send(b"more"))
    assert writer.get_loss() is None
    assert [writer.receive() for _ in range(3)] == [b"first", b"second", None]
    loss = writer.get_loss()
    assert loss is not None
    assert loss.was_up


def test_a_ticket_cannot_name_a_local_link(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        pair.decode_address = replace(pair.decode_address, transfer_endpoint="unix:///tmp/x")
        key = pair.open_handoff(1)
        ticket = pair.make_ticket(key, [3])
        pair.outbound.set_ticket(key, ticket)
        pair.expect_aborted(key, PeerUnreachable)


def test_a_loss_of_one_of_two_links_to_a_node_leaves_its_arena_mapped(tmp_path: Path) -> None:
    """A node that has stopped listening locally has links of both kinds."""
    with transfer_pair("shm", tmp_path) as pair:
        key = pair.open_handoff(2)
        ticket = pair.grant_ticket(key, [3, 4])
        pair.outbound.set_ticket(key, ticket)
        pair.announce_layers(key, [1, 2], layers=[0])
        pair.decode_events.expect_event(InboundStarted)
        (tmp_path / (pair.segment.name + LINK_SUFFIX)).unlink()
        pair.check_full_handoff()
        assert sorted(_dialled(pair)) == ["tcp", "unix"]
        loop: Any = pair.outbound._loop  # type: ignore[attr-defined]
        tcp = next(peer for peer, _ in loop._links.items() if peer[0].startswith("tcp"))
        loss = LinkLoss(PeerUnreachable("lost"), was_up=True)
        pair.outbound._thread.post_command(  # type: ignore[attr-defined]
            lambda: loop._drop_link(tcp, loss)
        )
        pair.announce_layers(key, [1, 2], layers=[1, 2])
        pair.outbound.seal_handoff(key, SEAL_INFO)
        pair.finish_handoff(ticket)
        assert pair.has_arrived([1, 2], [3, 4])


@pytest.mark.parametrize(
    ("backend", "scheme"), [("shm", "unix"), ("cuda_ipc", "unix"), ("zmq", "tcp")]
)
def test_one_sided_writers_use_it(backend: str, scheme: str, tmp_path: Path) -> None:
    with transfer_pair(backend, tmp_path) as pair:
        pair.check_full_handoff()
        assert _dialled(pair) == [scheme]


def test_writers_use_the_network_link_where_there_can_be_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: LocalDecodeLink, __: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(LocalDecodeLink, "__init__", refuse)
    with transfer_pair("shm", tmp_path) as pair:
        pair.check_full_handoff()
        assert _dialled(pair) == ["tcp"]
