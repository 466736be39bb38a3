"""Peers without the cluster token, and random bytes on every port, are refused and affect
nobody."""

import asyncio
import random
import struct

import grpc
import pytest

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.cluster_link.dialer import PROOF_METADATA_KEY, CoordinatorDialer, derive_link_proof
from baton.cluster_link.stream import decode_checked
from baton.pb.cluster_pb2 import NodeMessage
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core import frames
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDialer
from tests.faults.observed_cluster import PATIENCE_SECONDS, ObservedCluster
from tests.processes import (
    list_listening_addresses,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ZMTP = bytes([0xFF, *bytes(8), 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + b"\0" * 32
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def garbage_payloads() -> dict[str, bytes]:
    noise = random.Random(0).randbytes(4096)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return {
        "nothing": b"",
        "noise": noise,
        "pickle": b"\x80\x04\x95\x0e\0\0\0\0\0\0\0\x8c\x02os\x8c\x06system\x93.",
        "an endless header": b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 18),
        "an endless body": head + b"content-length: 99999999999\r\n\r\n" + noise,
        "a negative length": head + b"content-length: -1\r\n\r\n",
        "two lengths": head + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab",
        "chunks without end": head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        "http/2 and noise": _HTTP2 + noise,
        "http/2 and a huge frame": _HTTP2 + _SETTINGS + struct.pack(">I", 0xFFFFFF)[1:] + noise,
        "http/2 and a flood of settings": _HTTP2 + _SETTINGS * 5000,
        "zmtp and noise": _ZMTP + noise,
        "zmtp and a huge frame": _ZMTP + b"\6" + struct.pack(">Q", 1 << 62) + noise,
        "half a zmtp greeting": _ZMTP[:11],
    }


async def send_and_hang_up(host: str, port: int, data: bytes) -> None:
    """Send the bytes, read a little and close the connection; errors of the other end do not
    matter."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(0.3):
            writer.write(data)
            await writer.drain()
            await reader.read(1 << 16)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()


async def test_garbage_on_every_port_is_harmless(observed: ObservedCluster) -> None:
    pids = observed.cluster.get_pids()
    ports = list_listening_addresses(set(pids.values()))
    known = {int(address.rpartition(":")[2]) for address in _addresses(observed)}
    assert known <= {port for _, port in ports}
    assert {host for host, _ in ports} == {"127.0.0.1"}
    for _, port in sorted(ports):
        await asyncio.gather(
            *(send_and_hang_up("127.0.0.1", port, data) for data in garbage_payloads().values())
        )
    await observed.recover_and_check()
    assert observed.cluster.get_pids() == pids


def _addresses(observed: ObservedCluster) -> list[str]:
    where = observed.cluster.endpoints
    return [where.http, where.grpc, where.admin, where.cluster]


@pytest.mark.parametrize("token", ["", "not the cluster's"])
async def test_a_node_without_the_token_does_not_join(
    observed: ObservedCluster, token: str
) -> None:
    dialer = CoordinatorDialer(token)
    async with dialer.open_channel(observed.cluster.endpoints.cluster) as channel:
        call = dialer.open_stream(channel)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE  # no handshake, so no stream
    assert observed.cluster.config.cluster_token not in await call.details()


async def test_process_with_a_wrong_token_exits_with_a_reason(observed: ObservedCluster) -> None:
    cluster = observed.cluster
    cluster.kill("decode-1")
    cluster.node_settings("decode-1")["cluster_token"] = "wrong"
    cluster.start("decode-1")
    try:
        assert await cluster.wait_for_exit("decode-1", within=PATIENCE_SECONDS) == 2
        assert "wrong cluster token: give this process its --cluster-token" in cluster.log_tail(
            "decode-1"
        )
    finally:
        del cluster.node_settings("decode-1")["cluster_token"]


@pytest.mark.parametrize(
    "first", [b"", b"\x0a\x04abcd", NodeMessage(incarnation="x").SerializeToString()], ids=repr
)
async def test_a_stream_that_does_not_begin_with_a_join_is_ended(
    observed: ObservedCluster, first: bytes
) -> None:
    token = observed.cluster.config.cluster_token
    async with CoordinatorDialer(token).open_channel(observed.cluster.endpoints.cluster) as channel:
        method = channel.stream_stream("/baton.v1.NodeLink/Attach", request_serializer=bytes)
        call = method(metadata=((PROOF_METADATA_KEY, derive_link_proof(token)),))
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert decode_checked(NodeMessage, first) is None


async def test_a_writer_without_the_token_gets_no_answer(observed: ObservedCluster) -> None:
    endpoint = next(
        node.address
        for node in (await observed.cluster.get_status()).nodes
        if node.role == "decode"
    )
    dialer = ZmqDialer(derive_curve_keys("not the cluster's"), TransferSettings(link_timeout=1.0))
    link = dialer.dial(endpoint)
    try:
        link.send(frames.encode_frame(frames.RenewFrame("0" * 32, 0, "w", "d")))
        await observed.wait_until("the link is refused", link.get_loss)
        assert link.receive() is None
    finally:
        link.close()
        dialer.close()


async def test_only_the_coordinator_serves_clients_and_only_on_loopback(
    observed: ObservedCluster,
) -> None:
    pids = observed.cluster.get_pids()
    coordinator = {port for _, port in list_listening_addresses({pids[COORDINATOR]})}
    nodes = {port for _, port in list_listening_addresses(set(pids.values()) - {pids[COORDINATOR]})}
    assert {int(address.rpartition(":")[2]) for address in _addresses(observed)} <= coordinator
    assert not coordinator & nodes
