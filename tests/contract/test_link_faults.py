"""Faults of a link neither end a process nor delay later hand-offs."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.common.settings import TransferSettings
from kv_transfer.plane import (
    InboundLost,
    InboundSealed,
    OutboundAborted,
    OutboundCommitted,
    SealInfo,
)
from kv_transfer.transports.grpc_decode_link import GrpcDecodeLink
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from tests.contract.transfer_pair import TOKEN, TransferPair, transfer_pair, wait_until
from tests.fault_proxy import BOTH_DIRECTIONS, FaultProxy, LinkConditions

ROOT = Path(__file__).resolve().parents[2]

# The peer's connection is reset while the reader is at its high-water mark. With ZMTP heartbeats
# libzmq would then abort the process.
_RESET_AT_HIGH_WATER = """
import asyncio, zmq
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.common.settings import TransferSettings
from kv_transfer.transports.zmq_link import ZmqDecodeLink, ZmqDialer
from tests.fault_proxy import FaultProxy

async def main():
    settings = TransferSettings(link_timeout=2.0)
    decode = ZmqDecodeLink(derive_curve_keys("token"), settings)
    host, _, port = decode.endpoint.removeprefix("tcp://").rpartition(":")
    link = await FaultProxy.open("writer -> decode", (host, int(port)))
    dialer = ZmqDialer(derive_curve_keys("token"), settings)
    writer = dialer.dial(f"tcp://127.0.0.1:{link.port}")
    sent, idle = 0, 0
    while idle < 20 or sent <= settings.max_queued_messages:
        decode._serve_authentication()
        idle = 0 if writer.send(b"header", memoryview(bytes(1 << 16))) else idle + 1
        sent += idle == 0
        await asyncio.sleep(0.01 if idle else 0)
    link.reset_connections()
    await asyncio.sleep(1.5)
    print("alive", flush=True)

asyncio.run(main())
"""


def test_reset_at_the_high_water_mark_does_not_abort_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _RESET_AT_HIGH_WATER + "import os; os._exit(0)"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


async def _proxy_for(pair: TransferPair) -> FaultProxy:
    """A proxy that the writers of `pair` dial instead of decode."""
    scheme, _, where = pair.decode_address.transfer_endpoint.partition("://")
    host, _, port = where.rpartition(":")
    link = await FaultProxy.open("writer -> decode", (host, int(port)))
    pair.decode_address = replace(
        pair.decode_address, transfer_endpoint=f"{scheme}://127.0.0.1:{link.port}"
    )
    return link


@pytest.mark.parametrize("backend", ["zmq", "grpc"])
async def test_silent_link_is_replaced_by_a_new_one(backend: str, tmp_path: Path) -> None:
    """TCP acknowledges, but the peer never answers. The next hand-off has a new link."""
    with transfer_pair(backend, tmp_path) as pair:
        link = await _proxy_for(pair)

        def hand_off(ttl: float | None = None) -> None:
            key = pair.new_key()
            pair.outbound.open_handoff(key, 4)
            ticket = pair.make_ticket(key, [5], ttl=ttl)
            pair.inbound.grant_ticket(ticket)
            pair.outbound.set_ticket(key, ticket)
            pair.announce_layers(key, [1])
            pair.outbound.seal_handoff(key, SealInfo((17,)))

        def committed() -> None:
            hand_off()
            sealed = pair.decode_events.expect_event(InboundSealed)
            assert isinstance(sealed, InboundSealed)
            pair.inbound.commit_ticket(sealed.ticket_id)
            pair.prefill_events.expect_event(OutboundCommitted)

        await asyncio.to_thread(committed)
        connections = link.accepted_connections
        link.set_conditions(BOTH_DIRECTIONS, LinkConditions(is_blocked=True))
        hand_off(ttl=0.5)
        await asyncio.to_thread(pair.prefill_events.expect_event, OutboundAborted)
        await asyncio.to_thread(pair.decode_events.expect_event, InboundLost)
        link.set_conditions(BOTH_DIRECTIONS, LinkConditions())
        await asyncio.to_thread(committed)
        assert link.accepted_connections > connections
        await link.close()


async def test_grpc_backpressure_reaches_the_writer_and_a_reset_loses_only_the_tail() -> None:
    """Messages that decode does not take are bounded; those before the reset arrive in order."""
    settings = TransferSettings(link_timeout=2.0, max_queued_messages=8)
    decode = GrpcDecodeLink(TOKEN, settings)
    host, _, port = decode.endpoint.removeprefix("grpc://").rpartition(":")
    link = await FaultProxy.open("writer -> decode", (host, int(port)))
    writer = GrpcDialer(TOKEN, settings).dial(f"grpc://127.0.0.1:{link.port}")
    payload = memoryview(bytes(1 << 18))
    sent = refused = 0
    while refused < 50 or sent < 16:
        if writer.send(sent.to_bytes(4, "big"), payload):
            sent, refused = sent + 1, 0
        else:
            refused += 1
            await asyncio.sleep(0.01)
    assert sent < 400, sent
    link.reset_connections()
    await asyncio.to_thread(wait_until, lambda: writer.get_loss() is not None)
    loss = writer.get_loss()
    assert loss is not None
    assert loss.was_up

    def receive_all() -> list[bytes]:
        found: list[bytes] = []
        while (message := decode.receive()) is not None:
            assert message.payload == payload
            found.append(message.header)
        return found

    received = await asyncio.to_thread(receive_all)
    assert 8 <= len(received) < sent
    assert received == [number.to_bytes(4, "big") for number in range(len(received))]
    writer.close()
    decode.close()
    await link.close()
