"""Decode's zmq socket serves writers of its cluster and refuses everything else."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from baton.errors import ConfigError, UnmappableSegment
from baton.shared_memory.segment import compute_host_id
from baton.types import Incarnation, SegmentRef
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.factory import build_kv_receiver
from kv_transfer.plane import InboundLost, OutboundAborted
from kv_transfer.transports.zmq_keys import derive_curve_keys
from tests.contract.raw_writer import RawWriter
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    LAYOUT,
    TOKEN,
    TransferPair,
    transfer_pair,
    wait_until,
)

A_PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."


def address(pair: TransferPair) -> tuple[str, int]:
    host, _, port = pair.inbound.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_keys_are_the_tokens_and_nothing_elses() -> None:
    keys, other = derive_curve_keys(TOKEN), derive_curve_keys(TOKEN + " ")
    assert keys == derive_curve_keys(TOKEN)
    pairs = [keys.decode, keys.writer, other.decode, other.writer]
    assert len({pair.secret for pair in pairs} | {pair.public for pair in pairs}) == 8
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in pairs)


def test_a_writer_with_another_token_gets_nowhere(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path, outbound_token="a guess") as pair:
        key, ticket = pair.start_handoff([1, 2], [3, 4])
        event = pair.prefill_events.expect_event(OutboundAborted)
        assert event.key == key
        assert (
            "is the cluster token the same?" in event.error.message
            or "handshake" in event.error.message
        )
        wait_until(lambda: pair.inbound.counters().get("auth_failures", 0) >= 1)
        assert pair.is_untouched([3, 4])
        pair.inbound.revoke_ticket(ticket.id, event.error)
        pair.decode_events.expect_event(InboundLost)


def test_a_client_without_curve_gets_nowhere(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(pair.inbound.endpoint)
            plain.send_multipart([A_PICKLE, bytes(1000)])
            wait_until(lambda: pair.inbound.counters().get("auth_failures", 0) >= 1)
        assert "bad_frames" not in pair.inbound.counters()
        pair.check_full_handoff()


def test_a_client_that_knows_decodes_key_but_not_the_token_gets_nowhere(tmp_path: Path) -> None:
    """Decode's public key alone is not enough: only the cluster's client key is accepted."""
    with transfer_pair("zmq", tmp_path) as pair:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.curve_serverkey = derive_curve_keys(TOKEN).decode.public
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.connect(pair.inbound.endpoint)
            stranger.send_multipart([A_PICKLE])
            wait_until(lambda: pair.inbound.counters().get("auth_failures", 0) >= 1)
        assert "bad_frames" not in pair.inbound.counters()
        pair.check_full_handoff()


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        A_PICKLE,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100_000),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" * 50,
    ],
    ids=["nothing", "pickle", "http", "zeros", "zmtp"],
)
def test_bytes_that_are_no_zmtp_are_dropped(noise: bytes, tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        with socket.create_connection(address(pair)) as raw:
            raw.sendall(noise)
            pair.check_full_handoff()
        pair.check_full_handoff()


def test_many_half_open_connections_do_not_stop_a_hand_off(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        half_open = [socket.create_connection(address(pair)) for _ in range(300)]
        try:
            pair.check_full_handoff()
        finally:
            for raw in half_open:
                raw.close()
        pair.check_full_handoff()


def test_an_oversize_message_of_a_member_costs_it_its_connection_and_nobody_elses(
    tmp_path: Path,
) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            writer.send_open()
            writer.send_bytes(bytes(2 * MAX_HEADER_BYTES))
            wait_until(writer.is_link_lost)
        pair.check_full_handoff()


def test_a_member_that_never_reads_does_not_hold_others_up(tmp_path: Path) -> None:
    with transfer_pair("zmq", tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            for _ in range(5000):
                writer.send_bytes(b"\xc0")
            pair.check_full_handoff()
            wait_until(lambda: pair.inbound.counters().get("bad_frames", 0) == 5000)


# same host


def test_shm_is_chosen_for_the_same_host_and_zmq_otherwise(tmp_path: Path) -> None:
    with transfer_pair("auto", tmp_path) as pair:
        mine = compute_host_id(pair.folder)
        assert pair.inbound.choose_transport(mine) == "shm"
        assert pair.inbound.choose_transport("elsewhere") == "zmq"


def test_a_writer_that_cannot_map_the_segment_is_served_by_zmq_from_then_on(tmp_path: Path) -> None:
    """Two hosts with equal host ids: the first hand-off fails, the next one uses the network."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mine = compute_host_id(tmp_path)
    with transfer_pair("auto", tmp_path, outbound_folder=elsewhere, outbound_host=mine) as pair:
        pair.backend = pair.inbound.choose_transport(mine)
        key, ticket = pair.start_handoff([1, 2], [3, 4])
        pair.expect_aborted(key, UnmappableSegment)
        pair.expect_lost(ticket, UnmappableSegment)
        pair.backend = pair.inbound.choose_transport(mine)
        assert pair.backend == "zmq"
        pair.check_full_handoff()


@pytest.mark.parametrize("wrong", ["name", "incarnation", "offsets"])
def test_a_ticket_whose_segment_is_not_what_it_says_is_not_written(
    wrong: str, tmp_path: Path
) -> None:
    with transfer_pair("shm", tmp_path) as pair:
        key = pair.open_handoff(1)
        ticket = pair.grant_ticket(key, [3])
        match wrong:
            case "name":
                forged = replace(
                    ticket, segment=SegmentRef("../../etc/passwd", ticket.segment.incarnation)
                )
            case "incarnation":
                forged = replace(
                    ticket, segment=SegmentRef(ticket.segment.name, pair.writer_incarnation)
                )
            case _:
                forged = replace(ticket, block_offsets=(1 << 40,))
        pair.outbound.set_ticket(key, forged)
        pair.announce_layers(key, [1])
        pair.expect_aborted(key, UnmappableSegment)
        pair.expect_lost(ticket, UnmappableSegment)
        assert pair.is_untouched([3])


def test_a_listener_that_cannot_bind_says_where(tmp_path: Path) -> None:
    settings = replace(FAST_SETTINGS, listen="203.0.113.1:1", segment_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1:1"):
        build_kv_receiver(
            arena=memoryview(bytearray(LAYOUT.block_bytes)),
            layout=LAYOUT,
            incarnation=Incarnation("i"),
            token=TOKEN,
            fences=None,
            emit=lambda _: None,
            settings=settings,
        )


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_an_empty_token_is_refused_beyond_loopback(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cluster-token"):
        build_kv_receiver(
            arena=memoryview(bytearray(LAYOUT.block_bytes)),
            layout=LAYOUT,
            incarnation=Incarnation("i"),
            token="",
            fences=None,
            emit=lambda _: None,
            settings=TransferSettings(listen=listen, segment_folder=tmp_path),
        )
