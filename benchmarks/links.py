"""`links`: the speed of the transfer plane between two processes, without model or coordinator.

For each transport, one hand-off at a time: of a long prompt (GB/s of KV) and of a short one (from
the first layer announced to Committed). And the cost of encryption: the same bytes over bare
sockets, with CURVE and without.
"""

import argparse
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import zmq
from rich.console import Console

from baton import types
from baton.kv.blocks import KVLayout
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import (
    DEFAULT_SEGMENT_FOLDER,
    create_segment,
    round_up_segment_bytes,
)
from baton.types import (
    STAGED_TRANSPORTS,
    AttemptKey,
    BlockIndex,
    Incarnation,
    NodeName,
    RequestId,
    Ticket,
    TicketId,
    mint_id,
)
from benchmarks.figures.report import ResultRow, make_row, print_rows
from kv_transfer.common.settings import TransferSettings
from kv_transfer.factory import build_kv_receiver, build_kv_sender
from kv_transfer.kv_receiver import KVReceiver
from kv_transfer.plane import InboundSealed, OutboundAborted, OutboundCommitted, SealInfo

HELP = "what the transfer plane moves between two processes, and what encryption costs"
MESSAGE_BYTES = (1 << 18, 1 << 20)
# 1.5 MiB a block
LAYOUT = KVLayout(num_layers=24, num_kv_heads=8, head_dim=64, block_size=16, dtype="float32")
LONG_BLOCKS, SHORT_BLOCKS = 64, 2
_TOKEN = "of this measurement only"
_KEY = AttemptKey(RequestId("0" * 32), 0, 0)
_WRITER, _DECODE = Incarnation("writer"), Incarnation("decode")
_SOCKET_BYTES = 1 << 29
_EVENT_TIMEOUT = 60.0  # seconds


class SocketJob(msgspec.Struct):
    """The parameters of the sending process in a measurement over bare sockets."""

    port: int
    message_bytes: int
    # CURVE keys: decode's public, the writer's public and secret. Empty: no encryption.
    keys: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat", type=int, default=20, help="hand-offs of each kind (default 20)"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = []
    for transport in STAGED_TRANSPORTS:
        long, short = measure_plane(transport, options.repeat)
        rate = LONG_BLOCKS * LAYOUT.block_bytes / long / 1e9
        rows.append(make_row(f"links/{transport}/rate", rate, "GB/s", command))
        rows.append(make_row(f"links/{transport}/short", short * 1e3, "ms", command))
    for encrypted in (False, True):
        for size in MESSAGE_BYTES:
            name = f"links/socket/{'curve' if encrypted else 'plain'}/{size >> 10}KiB"
            rows.append(make_row(name, measure_socket(encrypted, size) / 1e9, "GB/s", command))
    print_rows(console, "transfer plane between two processes", rows)
    return rows


def measure_plane(transport: str, repeat: int) -> tuple[float, float]:
    """Return the median seconds of a LONG and of a SHORT hand-off.

    Decode runs in this process, the writer in another one.
    """
    arena = create_segment(
        DEFAULT_SEGMENT_FOLDER,
        "bench",
        round_up_segment_bytes(LONG_BLOCKS * LAYOUT.block_bytes, LAYOUT.block_bytes),
    )
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    inbound = build_kv_receiver(
        arena=arena.view,
        layout=LAYOUT,
        incarnation=_DECODE,
        token=_TOKEN,
        fences=ArenaFences(arena.path),
        emit=events.put,
        settings=TransferSettings(transport=transport),
    )

    def measure_handoff(writer: _PeerProcess, blocks: int) -> float:
        ticket = _make_ticket(inbound, arena.name, transport, blocks)
        inbound.grant_ticket(ticket)
        writer.send_json(ticket)
        while not isinstance(event := events.get(timeout=_EVENT_TIMEOUT), InboundSealed):
            pass
        inbound.commit_ticket(event.ticket_id)
        return writer.read_seconds()

    try:
        with _start_peer("write") as writer:
            measure_handoff(writer, LONG_BLOCKS)
            measure_handoff(writer, SHORT_BLOCKS)
            long = statistics.median(measure_handoff(writer, LONG_BLOCKS) for _ in range(repeat))
            short = statistics.median(measure_handoff(writer, SHORT_BLOCKS) for _ in range(repeat))
    finally:
        inbound.close()
        arena.close()
    return long, short


def _make_ticket(inbound: KVReceiver, segment: str, transport: str, blocks: int) -> Ticket:
    """Return a ticket for the first blocks of the arena."""
    return Ticket(
        id=TicketId(mint_id()),
        key=_KEY,
        decode_peer=types.PeerAddress(NodeName("decode"), _DECODE, "", inbound.endpoint),
        writer_incarnation=_WRITER,
        first_block=0,
        block_offsets=tuple(block * LAYOUT.block_bytes for block in range(blocks)),
        num_tokens=blocks * LAYOUT.block_size,
        ttl_seconds=10.0,
        transport=transport,
        segment=types.SegmentRef(segment, _DECODE),
        fence_byte=inbound.allocate_fence_byte(),
    )


def _run_writer() -> None:
    """Do one hand-off for each ticket on standard input, and print its seconds."""
    source = np.ones(LONG_BLOCKS * LAYOUT.block_bytes, dtype=np.uint8)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    plane = build_kv_sender(
        arena=source.data, layout=LAYOUT, incarnation=_WRITER, token=_TOKEN, emit=events.put
    )
    for line in sys.stdin:
        ticket = msgspec.json.decode(line, type=Ticket)
        blocks = [BlockIndex(block) for block in range(len(ticket.block_offsets))]
        plane.open_handoff(_KEY, ticket.num_tokens)
        plane.set_ticket(_KEY, ticket)
        began = time.perf_counter()
        for layer in range(LAYOUT.num_layers):
            plane.announce_layer(_KEY, layer, 0, blocks)
        plane.seal_handoff(_KEY, SealInfo((1,)))
        while not isinstance(event := events.get(timeout=_EVENT_TIMEOUT), OutboundCommitted):
            if isinstance(event, OutboundAborted):
                raise event.error
        _print_seconds(time.perf_counter() - began)
    plane.close()


def measure_socket(encrypted: bool, size: int) -> float:
    """Return bytes per second, in messages of `size` bytes, from a DEALER to a ROUTER."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as reader:
        job = SocketJob(0, size, [])
        if encrypted:
            public, reader.curve_secretkey = zmq.curve_keypair()
            reader.curve_publickey, reader.curve_server = public, True
            job.keys = [key.decode() for key in (public, *zmq.curve_keypair())]
        reader.rcvhwm = 64
        job.port = reader.bind_to_random_port("tcp://127.0.0.1")
        with _start_peer("send") as writer:
            writer.send_json(job)
            route, _ = reader.recv_multipart()
            began = time.perf_counter()
            for _ in range(_SOCKET_BYTES // size):
                reader.recv_multipart(copy=False)
            seconds = time.perf_counter() - began
            reader.send_multipart([route, b""])
            writer.read_seconds()
    return _SOCKET_BYTES / seconds


def _run_sender() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=SocketJob)
    with zmq.Context() as context, context.socket(zmq.DEALER) as writer:
        if job.keys:
            writer.curve_serverkey, writer.curve_publickey, writer.curve_secretkey = (
                key.encode() for key in job.keys
            )
        writer.sndhwm = 64
        writer.connect(f"tcp://127.0.0.1:{job.port}")
        writer.send(b"")
        payload = memoryview(bytearray(job.message_bytes))
        for _ in range(_SOCKET_BYTES // job.message_bytes):
            writer.send_multipart([b"header", payload], copy=False)
        writer.recv()
    _print_seconds(0.0)


class _PeerProcess:
    """A process that takes JSON lines and answers each with a number of seconds."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout

    def send_json(self, message: object) -> None:
        self._in.write(msgspec.json.encode(message) + b"\n")
        self._in.flush()

    def read_seconds(self) -> float:
        return msgspec.json.decode(self._out.readline(), type=float)


@contextmanager
def _start_peer(work: str) -> Iterator[_PeerProcess]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.links", work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            yield _PeerProcess(process)
        except BaseException:
            process.kill()
            raise


def _print_seconds(seconds: float) -> None:
    sys.stdout.write(f"{seconds}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"write": _run_writer, "send": _run_sender}[sys.argv[1]]()
