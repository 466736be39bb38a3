"""A KVSender in a process of its own, which tests can stop and kill.

It prints `ready`, reads one JSON line with a ticket and source blocks, hands off and prints how
that ended. Failpoints are armed by the environment.
"""

import queue
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from baton.process import log
from baton.process.failpoints import arm_from_environment
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.device.host_memory import HOST_DEVICE, HostMemory
from kv_transfer.device.writer_process import NO_DRIVER_FILE, ProvableWriter
from kv_transfer.factory import build_kv_sender
from kv_transfer.plane import OutboundAborted, OutboundCommitted, SealInfo
from tests.contract.transfer_pair import FAST_SETTINGS, LAYOUT, TOKEN


class WriterOrder(msgspec.Struct):
    """The line that the process reads."""

    ticket: Ticket
    source_blocks: tuple[int, ...]


def make_source_arena(seed: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, 8 * LAYOUT.block_bytes, dtype=np.uint8)


def main(folder: str, incarnation: str, seed: str, backend: str) -> None:
    log.configure_logging("warning", "json")  # to standard error: the test reads standard output
    arm_from_environment()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    arena = make_source_arena(int(seed)).data
    device = open_device(arena, Path(folder)) if backend == CUDA_IPC else None
    plane = build_kv_sender(
        arena=arena,
        layout=LAYOUT,
        incarnation=Incarnation(incarnation),
        token=TOKEN,
        emit=events.put,
        settings=replace(FAST_SETTINGS, segment_folder=Path(folder)),
        device=device,
    )
    _print_line("ready")
    order = msgspec.json.decode(sys.stdin.readline(), type=WriterOrder)
    key = AttemptKey(*order.ticket.key)
    plane.open_handoff(key, order.ticket.num_tokens)
    plane.set_ticket(key, order.ticket)
    for layer in range(LAYOUT.num_layers):
        plane.announce_layer(key, layer, 0, [BlockIndex(block) for block in order.source_blocks])
    plane.seal_handoff(key, SealInfo((1,)))
    _print_line(_wait_for_end(events))
    plane.close()


def open_device(arena: memoryview, folder: Path) -> HostMemory:
    """The arena as device memory that this process writes from; see tests/contract/device_pair."""
    writer = ProvableWriter(folder)
    writer.publish(HOST_DEVICE, NO_DRIVER_FILE)
    return HostMemory(arena, 8, LAYOUT, folder, "", writer.name)


def _wait_for_end(events: "queue.SimpleQueue[object]") -> str:
    while True:
        match events.get():
            case OutboundCommitted():
                return "committed"
            case OutboundAborted(_, error):
                return f"aborted {error.code}"


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
