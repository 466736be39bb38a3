"""Decode's grpc endpoint serves writers of its cluster and refuses everything else."""

import hmac
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.errors import ConfigError, PeerUnreachable
from baton.network import cluster_certificates as certificates
from baton.types import Incarnation
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.core.message_framing import pack_message, packed_message_size, unpack_message
from kv_transfer.factory import build_kv_receiver
from kv_transfer.transports import grpc_protocol
from kv_transfer.transports.grpc_decode_link import GrpcDecodeLink
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from tests.contract.raw_writer import RawWriter
from tests.contract.transfer_pair import (
    FAST_SETTINGS,
    LAYOUT,
    TOKEN,
    TransferPair,
    transfer_pair,
    wait_until,
)

TIMEOUT_SECONDS = 20.0
NOISE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "zeros": bytes(100_000),
    "tls": b"\x16\x03\x01\x40\x00\x01" + b"\xff" * 4000,
}


def address(pair: TransferPair) -> tuple[str, int]:
    host, _, port = pair.inbound.endpoint.removeprefix("grpc://").rpartition(":")
    return host, int(port)


def status_of_refused_call(
    credentials: grpc.ChannelCredentials | None,
    pair: TransferPair,
    metadata: Sequence[tuple[str, bytes]],
) -> str:
    """The status code for a caller that sends one message which is not a frame."""
    target = "{}:{}".format(*address(pair))
    options = [
        ("grpc.ssl_target_name_override", certificates.DECODE_CERTIFICATE_NAME),
        ("grpc.enable_http_proxy", 0),
    ]
    opened: Any = (
        grpc.insecure_channel(target, options=options)
        if credentials is None
        else grpc.secure_channel(target, credentials, options=options)
    )
    with opened as channel:
        call = channel.stream_stream(f"/{grpc_protocol.SERVICE}/{grpc_protocol.METHOD}")
        with pytest.raises(grpc.RpcError) as caught:
            list(
                call(
                    iter([pack_message(b"\xc0", None)]), metadata=metadata, timeout=TIMEOUT_SECONDS
                )
            )
    return str(caught.value.code().name)


def proof_metadata(token: str) -> Sequence[tuple[str, bytes]]:
    return ((grpc_protocol.PROOF_KEY, grpc_protocol.stream_proof(token)),)


def test_a_writer_with_another_token_gets_nowhere(tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path, outbound_token="a guess") as pair:
        key, ticket = pair.start_handoff([1, 2], [3, 4])
        pair.expect_aborted(key, PeerUnreachable)
        assert pair.is_untouched([3, 4])
        pair.inbound.revoke_ticket(ticket.id, PeerUnreachable("no"))
        pair.expect_lost(ticket, PeerUnreachable)


def test_its_error_asks_for_the_token(tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        link = GrpcDialer("a guess", FAST_SETTINGS).dial(pair.inbound.endpoint)
        wait_until(lambda: link.get_loss() is not None)
        loss = link.get_loss()
        link.close()
    assert loss is not None
    assert (loss.was_up, "is the cluster token the same?" in loss.error.message) == (False, True), (
        loss
    )


def foreign_credentials() -> grpc.ChannelCredentials:
    """Credentials that trust this cluster's authority and show a certificate of another cluster."""
    other = certificates._derive_authority_key("a guess")
    key, shown = certificates._issue_certificate(
        other, "writer.baton.internal", ExtendedKeyUsageOID.CLIENT_AUTH
    )
    return grpc.ssl_channel_credentials(
        certificates._authority_certificate(certificates._derive_authority_key(TOKEN)), key, shown
    )


def anonymous_credentials() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        certificates._authority_certificate(certificates._derive_authority_key(TOKEN))
    )


def decode_node_credentials() -> grpc.ChannelCredentials:
    authority = certificates._derive_authority_key(TOKEN)
    key, shown = certificates._issue_certificate(
        authority, certificates.DECODE_CERTIFICATE_NAME, ExtendedKeyUsageOID.SERVER_AUTH
    )
    return grpc.ssl_channel_credentials(certificates._authority_certificate(authority), key, shown)


@pytest.mark.parametrize(
    "make_credentials",
    [lambda: None, anonymous_credentials, foreign_credentials, decode_node_credentials],
)
def test_a_caller_without_a_writers_certificate_gets_nowhere(
    make_credentials: Any, tmp_path: Path
) -> None:
    """Plaintext, no certificate, one of another cluster, or decode's own certificate."""
    with transfer_pair("grpc", tmp_path) as pair:
        assert (
            status_of_refused_call(make_credentials(), pair, proof_metadata(TOKEN)) == "UNAVAILABLE"
        )
        assert "bad_frames" not in pair.inbound.counters()
        pair.check_full_handoff()


@pytest.mark.parametrize(
    "metadata", [(), proof_metadata("a guess"), ((grpc_protocol.PROOF_KEY, b""),)]
)
def test_a_stream_without_proof_of_the_token_is_refused(metadata: Any, tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        assert (
            status_of_refused_call(certificates.writer_channel_credentials(TOKEN), pair, metadata)
            == "UNAUTHENTICATED"
        )
        assert pair.inbound.counters()["auth_failures"] == 1
        assert "bad_frames" not in pair.inbound.counters()
        pair.check_full_handoff()


def test_the_proof_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return given == expected

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with transfer_pair("grpc", tmp_path) as pair:
        pair.check_full_handoff()
    assert compared == [(grpc_protocol.stream_proof(TOKEN), grpc_protocol.stream_proof(TOKEN))]


@contextmanager
def listening_server(credentials: grpc.ServerCredentials) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_writer_sends_nothing_to_who_is_no_decode_node() -> None:
    """A writer of this cluster, with its own certificate, cannot pose as a decode node."""
    authority = certificates._derive_authority_key(TOKEN)
    shown = certificates._issue_certificate(
        authority, "writer.baton.internal", ExtendedKeyUsageOID.CLIENT_AUTH
    )
    credentials = grpc.ssl_server_credentials(
        [shown], certificates._authority_certificate(authority), require_client_auth=True
    )
    with listening_server(credentials) as endpoint:
        link = GrpcDialer(TOKEN, FAST_SETTINGS).dial(endpoint)
        wait_until(lambda: link.get_loss() is not None)
        loss = link.get_loss()
        link.close()
    assert loss is not None
    assert not loss.was_up


def test_certificates_of_one_token_differ_and_share_their_authority() -> None:
    key, other_key = (
        certificates._derive_authority_key(token).private_numbers().private_value
        for token in (TOKEN, TOKEN + " ")
    )
    certificates._derive_authority_key.cache_clear()
    assert (
        key
        == certificates._derive_authority_key(TOKEN).private_numbers().private_value
        != other_key
    )
    authority = certificates._derive_authority_key(TOKEN)
    issued = [
        certificates._issue_certificate(authority, "a.b", ExtendedKeyUsageOID.CLIENT_AUTH)
        for _ in range(2)
    ]
    assert len({key for key, _ in issued}) == len({shown for _, shown in issued}) == 2


def test_certificates_are_good_by_every_clock() -> None:
    """Also by a clock that was never set (1970), and by one that is far ahead."""
    authority = certificates._derive_authority_key(TOKEN)
    _, issued = certificates._issue_certificate(authority, "a.b", ExtendedKeyUsageOID.CLIENT_AUTH)
    for shown in map(
        x509.load_pem_x509_certificate, (issued, certificates._authority_certificate(authority))
    ):
        assert shown.not_valid_before_utc.timestamp() <= 0
        assert shown.not_valid_after_utc.year == 9999


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_bytes_that_are_no_tls_are_dropped(noise: bytes, tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        with socket.create_connection(address(pair)) as raw:
            raw.sendall(noise)
            pair.check_full_handoff()
        pair.check_full_handoff()


def test_many_half_open_connections_do_not_stop_a_hand_off(tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        half_open = [socket.create_connection(address(pair)) for _ in range(300)]
        try:
            pair.check_full_handoff()
        finally:
            for raw in half_open:
                raw.close()
        pair.check_full_handoff()


def test_an_oversize_message_of_a_member_costs_it_its_stream_and_nobody_elses(
    tmp_path: Path,
) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            writer.send_open()
            writer.send_bytes(bytes(2 * MAX_HEADER_BYTES))
            wait_until(writer.is_link_lost)
        pair.check_full_handoff()


def test_a_member_that_never_reads_does_not_hold_others_up(tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        ticket = pair.grant_ticket(pair.new_key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            for _ in range(2000):
                writer.send_bytes(b"\xc0")
            pair.check_full_handoff()
            wait_until(lambda: pair.inbound.counters().get("bad_frames", 0) == 2000)


def test_messages_that_nobody_packed_are_bad_frames(tmp_path: Path) -> None:
    with transfer_pair("grpc", tmp_path) as pair:
        target = "{}:{}".format(*address(pair))
        options = [("grpc.ssl_target_name_override", certificates.DECODE_CERTIFICATE_NAME)]
        parcels = [
            b"",
            b"\x01",
            b"\xff\xff\xff\xff",
            bytes(4),
            bytes(500),
            b"\x80\x04\x95}\x94\x8c\x01a\x94K\x01s.",
        ]
        with grpc.secure_channel(
            target, certificates.writer_channel_credentials(TOKEN), options=options
        ) as channel:
            call = channel.stream_stream(f"/{grpc_protocol.SERVICE}/{grpc_protocol.METHOD}")
            list(call(iter(parcels), metadata=proof_metadata(TOKEN), timeout=TIMEOUT_SECONDS))
        wait_until(lambda: pair.inbound.counters().get("bad_frames", 0) == len(parcels))
        pair.check_full_handoff()


@pytest.mark.parametrize("payload", [None, b"x", bytes(1000)])
def test_a_parcel_is_what_was_packed(payload: bytes | None) -> None:
    packed = pack_message(b"header", None if payload is None else memoryview(payload))
    assert unpack_message(packed) == (b"header", payload)
    assert len(packed) == packed_message_size(6, len(payload or b""))


@pytest.mark.parametrize(
    "endpoint",
    [
        "grpc://",
        "grpc://host",
        "grpc://host:1/x",
        "grpc://unix:/tmp/x:1",
        "grpc://[::1",
        "grpc://xds:///a:1",
    ],
)
def test_an_endpoint_that_is_no_address_is_not_dialled(endpoint: str) -> None:
    link = GrpcDialer(TOKEN, FAST_SETTINGS).dial(endpoint)
    loss = link.get_loss()
    link.close()
    assert loss is not None
    assert "HOST:PORT" in loss.error.message


def test_a_listener_that_cannot_bind_says_where(tmp_path: Path) -> None:
    settings = replace(
        FAST_SETTINGS, transport="grpc", listen="203.0.113.1:1", segment_folder=tmp_path
    )
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1:1"):
        _make_inbound(settings, TOKEN)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_an_empty_token_is_refused_beyond_loopback(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cluster-token"):
        _make_inbound(
            TransferSettings(transport="grpc", listen=listen, segment_folder=tmp_path), ""
        )


def _make_inbound(settings: TransferSettings, token: str) -> None:
    build_kv_receiver(
        arena=memoryview(bytearray(LAYOUT.block_bytes)),
        layout=LAYOUT,
        incarnation=Incarnation("i"),
        token=token,
        fences=None,
        emit=lambda _: None,
        settings=settings,
    )


def test_writers_are_told_what_is_advertised() -> None:
    link = GrpcDecodeLink(TOKEN, TransferSettings(advertise="decode-0.example"))
    try:
        assert link.endpoint.startswith("grpc://decode-0.example:")
    finally:
        link.close()
