"""A prefill node's transfer plane in a process of its own, so that it can be stopped and killed. Reads one JSON line:
ticket, segment folder, source blocks. Says each event of the plane on a line. Failpoints come by environment."""

import queue
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from baton.types import AttemptKey, BlockIndex, Ticket
from kv_transfer.factory import build_outbound
from kv_transfer.plane import Aborted, Committed, SealInfo
from tests.contract.rig import LAYOUT, QUICK, TOKEN


class Order(msgspec.Struct):
    ticket: Ticket
    folder: str
    source: tuple[int, ...]
    seed: int


def source_arena(seed: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, 8 * LAYOUT.block_bytes, dtype=np.uint8)


def main() -> None:
    _say("ready")
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    ticket = order.ticket
    key = AttemptKey(*ticket.key)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    plane = build_outbound(
        arena=source_arena(order.seed).data,
        layout=LAYOUT,
        incarnation=ticket.writer,
        token=TOKEN,
        emit=events.put,
        settings=replace(QUICK, segment_folder=Path(order.folder)),
    )
    plane.open(key, ticket.num_tokens)
    plane.ticket(key, ticket)
    for layer in range(LAYOUT.num_layers):
        plane.layer_ready(key, layer, 0, [BlockIndex(block) for block in order.source])
    plane.seal(key, SealInfo((1,)))
    while True:
        event = events.get()
        match event:
            case Committed():
                _say("committed")
                break
            case Aborted(_, error):
                _say(f"aborted {error.code}")
                break
    plane.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
