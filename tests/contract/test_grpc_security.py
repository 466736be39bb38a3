"""Who may call decode's grpc endpoint, and what becomes of the rest."""

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

from baton import cluster_certificates as certificates
from baton.errors import ConfigError, PeerGone
from baton.types import Incarnation
from kv_transfer import grpc_terms
from kv_transfer.core.frames import MAX_HEADER_BYTES
from kv_transfer.core.parcels import pack, packed_size, unpack
from kv_transfer.factory import build_inbound
from kv_transfer.grpc_decode_link import GrpcDecodeLink
from kv_transfer.grpc_writer_link import GrpcDialer
from kv_transfer.settings import TransferSettings
from tests.contract.raw_writer import RawWriter
from tests.contract.rig import LAYOUT, QUICK, TOKEN, Rig, eventually, rig

PATIENCE = 20.0  # seconds
NOISE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "zeros": bytes(100_000),
    "tls": b"\x16\x03\x01\x40\x00\x01" + b"\xff" * 4000,
}


def address(pair: Rig) -> tuple[str, int]:
    host, _, port = pair.inbound.endpoint.removeprefix("grpc://").rpartition(":")
    return host, int(port)


def refusal(credentials: grpc.ChannelCredentials | None, pair: Rig, metadata: Sequence[tuple[str, bytes]]) -> str:
    """The status code that a caller gets who sends one message that is no frame."""
    target = "{}:{}".format(*address(pair))
    options = [("grpc.ssl_target_name_override", certificates.DECODE_NAME), ("grpc.enable_http_proxy", 0)]
    made: Any = (
        grpc.insecure_channel(target, options=options)
        if credentials is None
        else grpc.secure_channel(target, credentials, options=options)
    )
    with made as channel:
        call = channel.stream_stream(f"/{grpc_terms.SERVICE}/{grpc_terms.METHOD}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([pack(b"\xc0", None)]), metadata=metadata, timeout=PATIENCE))
    return str(caught.value.code().name)


def proven(token: str) -> Sequence[tuple[str, bytes]]:
    return ((grpc_terms.PROOF_KEY, grpc_terms.proof(token)),)


def test_a_writer_with_another_token_gets_nowhere(tmp_path: Path) -> None:
    with rig("grpc", tmp_path, outbound_token="a guess") as pair:
        key, ticket = pair.hand_off([1, 2], [3, 4])
        pair.aborted(key, PeerGone)
        assert pair.untouched([3, 4])
        pair.inbound.revoke(ticket.id, PeerGone("no"))
        pair.lost(ticket, PeerGone)


def test_its_error_asks_for_the_token(tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        link = GrpcDialer("a guess", QUICK).dial(pair.inbound.endpoint)
        eventually(lambda: link.loss() is not None)
        loss = link.loss()
        link.close()
    assert loss is not None
    assert (loss.was_up, "is the cluster token the same?" in loss.error.message) == (False, True), loss


def stranger() -> grpc.ChannelCredentials:
    """Trusts this cluster's authority, were its certificate ever to leak, and shows a certificate of another's."""
    other = certificates._authority("a guess")
    key, shown = certificates._issue(other, "writer.baton.internal", ExtendedKeyUsageOID.CLIENT_AUTH)
    return grpc.ssl_channel_credentials(certificates._self_signed(certificates._authority(TOKEN)), key, shown)


def no_certificate() -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificates._self_signed(certificates._authority(TOKEN)))


def decodes_certificate() -> grpc.ChannelCredentials:
    authority = certificates._authority(TOKEN)
    key, shown = certificates._issue(authority, certificates.DECODE_NAME, ExtendedKeyUsageOID.SERVER_AUTH)
    return grpc.ssl_channel_credentials(certificates._self_signed(authority), key, shown)


@pytest.mark.parametrize("made", [lambda: None, no_certificate, stranger, decodes_certificate])
def test_a_caller_without_a_writers_certificate_gets_nowhere(made: Any, tmp_path: Path) -> None:
    """Plaintext; no certificate; one of another cluster; one of this cluster that is for the other end."""
    with rig("grpc", tmp_path) as pair:
        assert refusal(made(), pair, proven(TOKEN)) == "UNAVAILABLE"
        assert "bad_frames" not in pair.inbound.counters()
        pair.works()


@pytest.mark.parametrize("metadata", [(), proven("a guess"), ((grpc_terms.PROOF_KEY, b""),)])
def test_a_stream_without_proof_of_the_token_is_refused(metadata: Any, tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        assert refusal(certificates.writer_credentials(TOKEN), pair, metadata) == "UNAUTHENTICATED"
        assert pair.inbound.counters()["auth_failures"] == 1
        assert "bad_frames" not in pair.inbound.counters()
        pair.works()


def test_the_proof_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compared = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return given == expected

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with rig("grpc", tmp_path) as pair:
        pair.works()
    assert compared == [(grpc_terms.proof(TOKEN), grpc_terms.proof(TOKEN))]


@contextmanager
def listening(credentials: grpc.ServerCredentials) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_writer_sends_nothing_to_who_is_no_decode_node() -> None:
    """One of this cluster's own writers, with its own certificate, where a decode node is expected."""
    authority = certificates._authority(TOKEN)
    shown = certificates._issue(authority, "writer.baton.internal", ExtendedKeyUsageOID.CLIENT_AUTH)
    credentials = grpc.ssl_server_credentials([shown], certificates._self_signed(authority), require_client_auth=True)
    with listening(credentials) as endpoint:
        link = GrpcDialer(TOKEN, QUICK).dial(endpoint)
        eventually(lambda: link.loss() is not None)
        loss = link.loss()
        link.close()
    assert loss is not None
    assert not loss.was_up


def test_certificates_of_one_token_differ_and_share_their_authority() -> None:
    one, other = (certificates._authority(token).private_numbers().private_value for token in (TOKEN, TOKEN + " "))
    certificates._authority.cache_clear()
    assert one == certificates._authority(TOKEN).private_numbers().private_value != other
    authority = certificates._authority(TOKEN)
    issued = [certificates._issue(authority, "a.b", ExtendedKeyUsageOID.CLIENT_AUTH) for _ in range(2)]
    assert len({key for key, _ in issued}) == len({shown for _, shown in issued}) == 2


def test_certificates_are_good_by_every_clock() -> None:
    """Also by one that was never set and stands at the epoch, and by one that is far ahead."""
    authority = certificates._authority(TOKEN)
    _, issued = certificates._issue(authority, "a.b", ExtendedKeyUsageOID.CLIENT_AUTH)
    for shown in map(x509.load_pem_x509_certificate, (issued, certificates._self_signed(authority))):
        assert shown.not_valid_before_utc.timestamp() <= 0
        assert shown.not_valid_after_utc.year == 9999


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_bytes_that_are_no_tls_are_dropped(noise: bytes, tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        with socket.create_connection(address(pair)) as raw:
            raw.sendall(noise)
            pair.works()
        pair.works()


def test_many_half_open_connections_do_not_stop_a_hand_off(tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        half_open = [socket.create_connection(address(pair)) for _ in range(300)]
        try:
            pair.works()
        finally:
            for raw in half_open:
                raw.close()
        pair.works()


def test_an_oversize_message_of_a_member_costs_it_its_stream_and_nobody_elses(tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        ticket = pair.granted(pair.key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            writer.open()
            writer.send_bytes(bytes(2 * MAX_HEADER_BYTES))
            eventually(writer.lost)
        pair.works()


def test_a_member_that_never_reads_does_not_hold_others_up(tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        ticket = pair.granted(pair.key(), [3], ttl=1000.0)
        with RawWriter(pair, ticket) as writer:
            for _ in range(2000):
                writer.send_bytes(b"\xc0")
            pair.works()
            eventually(lambda: pair.inbound.counters().get("bad_frames", 0) == 2000)


def test_messages_that_nobody_packed_are_bad_frames(tmp_path: Path) -> None:
    with rig("grpc", tmp_path) as pair:
        target = "{}:{}".format(*address(pair))
        options = [("grpc.ssl_target_name_override", certificates.DECODE_NAME)]
        parcels = [b"", b"\x01", b"\xff\xff\xff\xff", bytes(4), bytes(500), b"\x80\x04\x95}\x94\x8c\x01a\x94K\x01s."]
        with grpc.secure_channel(target, certificates.writer_credentials(TOKEN), options=options) as channel:
            call = channel.stream_stream(f"/{grpc_terms.SERVICE}/{grpc_terms.METHOD}")
            list(call(iter(parcels), metadata=proven(TOKEN), timeout=PATIENCE))
        eventually(lambda: pair.inbound.counters().get("bad_frames", 0) == len(parcels))
        pair.works()


@pytest.mark.parametrize("payload", [None, b"x", bytes(1000)])
def test_a_parcel_is_what_was_packed(payload: bytes | None) -> None:
    packed = pack(b"header", None if payload is None else memoryview(payload))
    assert unpack(packed) == (b"header", payload)
    assert len(packed) == packed_size(6, len(payload or b""))


@pytest.mark.parametrize(
    "endpoint",
    ["grpc://", "grpc://host", "grpc://host:1/x", "grpc://unix:/tmp/x:1", "grpc://[::1", "grpc://xds:///a:1"],
)
def test_an_endpoint_that_is_no_address_is_not_dialled(endpoint: str) -> None:
    link = GrpcDialer(TOKEN, QUICK).dial(endpoint)
    loss = link.loss()
    link.close()
    assert loss is not None
    assert "HOST:PORT" in loss.error.message


def test_a_listener_that_cannot_bind_says_where(tmp_path: Path) -> None:
    settings = replace(QUICK, transport="grpc", listen="203.0.113.1:1", segment_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1:1"):
        _inbound(settings, TOKEN)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_an_empty_token_is_refused_beyond_loopback(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cluster-token"):
        _inbound(TransferSettings(transport="grpc", listen=listen, segment_folder=tmp_path), "")


def _inbound(settings: TransferSettings, token: str) -> None:
    build_inbound(
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
