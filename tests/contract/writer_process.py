"""A prefill node's transfer plane in a process of its own, so that it can be stopped and killed. Says `ready`, reads
one JSON line with ticket and source blocks, says how it ended. Failpoints come by environment."""

import queue
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from baton import log
from baton.failpoints import arm_from_environment
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_transfer.factory import build_outbound
from kv_transfer.plane import Aborted, Committed, SealInfo
from tests.contract.rig import LAYOUT, QUICK, TOKEN


class Order(msgspec.Struct):
    ticket: Ticket
    source: tuple[int, ...]


def source_arena(seed: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, 8 * LAYOUT.block_bytes, dtype=np.uint8)


def main(folder: str, incarnation: str, seed: str) -> None:
    log.configure("warning", "json")  # to standard error: what is said on the other one is the test's
    arm_from_environment()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    plane = build_outbound(
        arena=source_arena(int(seed)).data,
        layout=LAYOUT,
        incarnation=Incarnation(incarnation),
        token=TOKEN,
        emit=events.put,
        settings=replace(QUICK, segment_folder=Path(folder)),
    )
    _say("ready")
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    key = AttemptKey(*order.ticket.key)
    plane.open(key, order.ticket.num_tokens)
    plane.ticket(key, order.ticket)
    for layer in range(LAYOUT.num_layers):
        plane.layer_ready(key, layer, 0, [BlockIndex(block) for block in order.source])
    plane.seal(key, SealInfo((1,)))
    _say(_end(events))
    plane.close()


def _end(events: "queue.SimpleQueue[object]") -> str:
    while True:
        match events.get():
            case Committed():
                return "committed"
            case Aborted(_, error):
                return f"aborted {error.code}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
