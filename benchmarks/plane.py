"""`plane`: how much the transfer plane's thread slows the thread that computes, in one process.

The thread that computes does what a node's does between two waits. `launches` are small operations
of torch, each of which lets go of Python's lock and takes it again, as launches of kernels do.
`layers` are calls of native code of a millisecond each, as the layers of the native CPU kernels
are. In turns, nothing else happens, or hand-offs flow back to back to another process. The figure
is the time of the same work beside the idle windows around it.

With two cores or more, the thread that computes has the first one to itself, and the plane's thread
and the other process have the others. What remains then is waiting for Python's lock and for
memory; `launches` needs no memory. `lost` is what a change of the plane should lower: the time of
the thread that computes which is lost for each gigabyte that is handed over.
"""

import argparse
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
from rich.console import Console

from baton import types
from baton.kv.blocks import KVLayout
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import (
    DEFAULT_SEGMENT_FOLDER,
    create_segment,
    round_up_segment_bytes,
)
from baton.types import AttemptKey, BlockIndex, Incarnation, NodeName, RequestId, Ticket, TicketId
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.report import ResultRow, make_row, print_rows
from kv_transfer.common.settings import TransferSettings
from kv_transfer.factory import build_kv_receiver, build_kv_sender
from kv_transfer.plane import InboundSealed, OutboundAborted, OutboundCommitted, SealInfo

HELP = "how much the transfer plane's thread slows the thread that computes"
_LAYOUT = KVLayout(num_layers=24, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
_BLOCKS = 64  # of a hand-off, 384 KiB each
_TRANSPORTS = ("shm", "zmq")
_WRITER, _DECODE = Incarnation("writer"), Incarnation("decode")
_TOKEN = "of this measurement only"
_EVENT_TIMEOUT = 60.0  # seconds
_LAUNCHES, _LAYERS = 2000, 20  # of one piece of work
_LAYER_BYTES = 4 << 20  # that a layer reads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, help="windows of each kind (default 9)")
    parser.add_argument(
        "--window", type=float, default=1.0, help="seconds of each window (default 1)"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = []
    works = {"launches": make_launches(), "layers": make_layers()}
    for transport in _TRANSPORTS:
        with _run_handoffs(transport) as flow:
            for name, work in works.items():
                idle, ratio, rate = _measure(work, flow, options.rounds, options.window)
                prefix = f"plane/{transport}/{name}"
                lost = (1.0 - 1.0 / ratio) / rate  # seconds a byte
                rows += [
                    make_row(f"{prefix}_idle", idle * 1e3, "ms", command),
                    make_row(f"{prefix}_slowed", ratio, "x idle", command),
                    make_row(f"{prefix}_moved", rate / 1e9, "GB/s", command),
                    make_row(f"{prefix}_lost", lost * 1e12, "ms/GB", command),
                ]
    print_rows(console, "work of the compute thread while hand-offs flow", rows)
    return rows


def make_launches() -> Callable[[], object]:
    """Small operations of torch, each of which lets go of Python's lock."""
    import torch

    torch.set_num_threads(1)
    values, out = torch.ones(64), torch.empty(64)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(values, values, out=out)

    return launch


def make_layers() -> Callable[[], object]:
    """Calls of native code that read memory. Raises RuntimeError without native kernels."""
    from kv_kernels.native.native_library import NoNativeLibrary, load_library

    library = load_library()
    if isinstance(library, NoNativeLibrary):
        raise RuntimeError(f"no native kernels: {library.reason}")
    read, buffer = library.functions.kvn_read_two_streams, np.ones(_LAYER_BYTES + 64, np.uint8)
    address = -(-buffer.ctypes.data // 64) * 64

    def compute() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        for _ in range(_LAYERS):
            read(address, _LAYER_BYTES)
        return buffer

    return compute


def _measure(
    work: Callable[[], object], flow: "HandoffFlow", rounds: int, window: float
) -> tuple[float, float, float]:
    """Median seconds of the work while idle, its ratio while hand-offs flow, and bytes a second."""
    idle_windows = [_time_work(work, window)]
    ratios, moved = [], 0
    for _ in range(rounds):
        before = flow.num_ended
        with flow.flowing():
            loaded = _time_work(work, window)
            moved += flow.num_ended - before
        idle_windows.append(_time_work(work, window))
        ratios.append(loaded / ((idle_windows[-2] + idle_windows[-1]) / 2))
    size = moved * _BLOCKS * _LAYOUT.block_bytes
    return percentile(idle_windows, 50), percentile(ratios, 50), size / (rounds * window)


def _time_work(work: Callable[[], object], window: float) -> float:
    """Mean seconds of one piece of work: a long wait counts as much as many short ones."""
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < window:
        work()
        count += 1
    return elapsed / count


class HandoffFlow:
    """Hands KV over back to back while it is switched on, on a thread of its own."""

    def __init__(self, transport: str) -> None:
        self.num_ended = 0
        self.has_begun = threading.Event()  # the first hand-off has ended
        self._switched_on, self._is_idle = threading.Event(), threading.Event()
        self._is_stopping = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._receiver = context.Process(target=_receive, args=(transport, theirs), daemon=True)
        self._receiver.start()
        self._source = np.ones(_BLOCKS * _LAYOUT.block_bytes, dtype=np.uint8)
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._plane = build_kv_sender(
            arena=self._source.data,
            layout=_LAYOUT,
            incarnation=_WRITER,
            token=_TOKEN,
            emit=self._events.put,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        self._is_idle.clear()
        self._switched_on.set()
        try:
            yield
        finally:
            self._switched_on.clear()
            self._is_idle.wait(_EVENT_TIMEOUT)

    def close(self) -> None:
        self._is_stopping = True
        self._switched_on.set()
        self._thread.join()
        self._plane.close()
        self._pipe.send(None)
        self._receiver.join()

    def _run(self) -> None:
        while self._switched_on.wait() and not self._is_stopping:
            self._hand_over()
            self.num_ended += 1
            self.has_begun.set()
            if not self._switched_on.is_set():
                self._is_idle.set()

    def _hand_over(self) -> None:
        blocks = [BlockIndex(block) for block in range(_BLOCKS)]
        key = AttemptKey(RequestId(f"{self.num_ended:032x}"), 0, 0)
        self._pipe.send(key)
        ticket: Ticket = self._pipe.recv()
        self._plane.open_handoff(key, ticket.num_tokens)
        self._plane.set_ticket(key, ticket)
        for layer in range(_LAYOUT.num_layers):
            self._plane.announce_layer(key, layer, 0, blocks)
        self._plane.seal_handoff(key, SealInfo((1,)))
        while not isinstance(event := self._events.get(timeout=_EVENT_TIMEOUT), OutboundCommitted):
            if isinstance(event, OutboundAborted):
                raise event.error


@contextmanager
def _run_handoffs(transport: str) -> Iterator[HandoffFlow]:
    """A flow to another process. The calling thread gets the first core to itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)  # for the threads and the process that start now
    flow = HandoffFlow(transport)
    os.sched_setaffinity(0, cores[:1])
    try:
        with flow.flowing():
            flow.has_begun.wait(_EVENT_TIMEOUT)  # it dials, and maps the arena
        yield flow
    finally:
        flow.close()
        os.sched_setaffinity(0, cores)


def _receive(transport: str, pipe: Connection) -> None:
    """Grant a ticket for each key, and commit what was sealed, in a process of its own."""
    size = round_up_segment_bytes(_BLOCKS * _LAYOUT.block_bytes, _LAYOUT.block_bytes)
    arena = create_segment(DEFAULT_SEGMENT_FOLDER, "bench", size)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    plane = build_kv_receiver(
        arena=arena.view,
        layout=_LAYOUT,
        incarnation=_DECODE,
        token=_TOKEN,
        fences=ArenaFences(arena.path),
        emit=events.put,
        settings=TransferSettings(transport=transport),
    )
    while (key := pipe.recv()) is not None:
        ticket = Ticket(
            id=TicketId(types.mint_id()),
            key=key,
            decode_peer=types.PeerAddress(NodeName("decode"), _DECODE, "", plane.endpoint),
            writer_incarnation=_WRITER,
            first_block=0,
            block_offsets=tuple(block * _LAYOUT.block_bytes for block in range(_BLOCKS)),
            num_tokens=_BLOCKS * _LAYOUT.block_size,
            ttl_seconds=10.0,
            transport=transport,
            segment=types.SegmentRef(arena.name, _DECODE),
            fence_byte=plane.allocate_fence_byte(),
        )
        plane.grant_ticket(ticket)
        pipe.send(ticket)
        while not isinstance(event := events.get(timeout=_EVENT_TIMEOUT), InboundSealed):
            pass
        plane.commit_ticket(event.ticket_id)
    plane.close()
    arena.close()
