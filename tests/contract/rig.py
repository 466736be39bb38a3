"""Two planes and two arenas of one backend, and helpers to see through a hand-off. No node, no model."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.failpoints import Failpoints
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from baton.segment import Segment, create, segment_bytes
from baton.types import (
    AttemptKey,
    BlockIndex,
    Incarnation,
    NodeName,
    PeerAddress,
    RequestId,
    SegmentRef,
    Ticket,
    TicketId,
    mint_id,
)
from kv_transfer.factory import build_inbound, build_outbound
from kv_transfer.plane import InboundEvent, InboundPlane, OutboundEvent, OutboundPlane
from kv_transfer.settings import TransferSettings

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
TOKEN = "the cluster's token"
BACKENDS = ("memory", "shm", "zmq")
QUICK = TransferSettings(ticket_ttl=5.0, progress_timeout=5.0, renew_interval=0.5, fence_retry=0.02, link_timeout=2.0)
E = TypeVar("E")
PATIENCE = 20.0  # seconds; only a failing test waits so long


class Inbox(queue.SimpleQueue):  # type: ignore[type-arg]
    def expect(self, kind: type[E]) -> E:
        """The next event, which must be of this kind; LayerLanded and Started are passed over unless asked for."""
        while True:
            event = self.get(timeout=PATIENCE)
            if isinstance(event, kind):
                return event
            assert type(event).__name__ in ("LayerLanded", "Started"), f"{event} came, {kind.__name__} was expected"


@dataclass
class Rig:
    backend: str
    layout: KVLayout
    inbound: InboundPlane
    outbound: OutboundPlane
    decode_events: Inbox
    prefill_events: Inbox
    target: NDArray[Any]  # decode's arena, [block][layer][byte]
    source: NDArray[Any]  # prefill's arena
    decode: PeerAddress
    writer: Incarnation
    segment: SegmentRef

    def key(self, attempt: int = 0) -> AttemptKey:
        return AttemptKey(RequestId(mint_id()), attempt, 0)

    def ticket(self, key: AttemptKey, blocks: list[int], first_block: int = 0, ttl: float = 5.0) -> Ticket:
        return Ticket(
            id=TicketId(mint_id()),
            key=key,
            decode=self.decode,
            writer=self.writer,
            first_block=first_block,
            offsets=tuple(block * self.layout.block_bytes for block in blocks),
            num_tokens=(first_block + len(blocks)) * self.layout.block_size,
            ttl=ttl,
            transport=self.backend,
            segment=self.segment,
            fence=self.inbound.mint_fence(),
        )

    def announce(self, key: AttemptKey, source: list[int], first: int = 0, layers: list[int] | None = None) -> None:
        for layer in range(self.layout.num_layers) if layers is None else layers:
            self.outbound.layer_ready(key, layer, first, [BlockIndex(block) for block in source])

    def landed_equals_sent(self, source: list[int], target: list[int]) -> bool:
        return bool(np.array_equal(self.target[target], self.source[source]))


@contextmanager
def rig(
    backend: str,
    folder: Path,
    *,
    settings: TransferSettings = QUICK,
    blocks: int = 32,
    layout: KVLayout = LAYOUT,
    failpoints: str = "",
) -> Iterator[Rig]:
    settings = replace(settings, transport=backend, segment_folder=folder)
    size = segment_bytes(blocks * layout.block_bytes, layout.block_bytes)
    segment: Segment = create(folder, "arena", size)
    fences = ArenaFences(segment.path)
    source = np.random.default_rng(7).integers(0, 256, blocks * layout.block_bytes, dtype=np.uint8)
    decode_events, prefill_events = Inbox(), Inbox()
    points = Failpoints(failpoints)
    decode, writer = Incarnation(mint_id(64)), Incarnation(mint_id(64))
    inbound = build_inbound(
        arena=segment.view,
        layout=layout,
        incarnation=decode,
        token=TOKEN,
        fences=fences,
        emit=decode_events.put,
        settings=settings,
        failpoints=points,
    )
    outbound = build_outbound(
        arena=source.data,
        layout=layout,
        incarnation=writer,
        token=TOKEN,
        emit=prefill_events.put,
        settings=settings,
        failpoints=points,
    )
    shape = (-1, layout.num_layers, layout.slab_bytes)
    try:
        yield Rig(
            backend=backend,
            layout=layout,
            inbound=inbound,
            outbound=outbound,
            decode_events=decode_events,
            prefill_events=prefill_events,
            target=np.frombuffer(segment.view, dtype=np.uint8)[: blocks * layout.block_bytes].reshape(shape),
            source=source.reshape(shape),
            decode=PeerAddress(NodeName("decode-0"), decode, "host", inbound.endpoint),
            writer=writer,
            segment=SegmentRef(segment.name, decode),
        )
    finally:
        outbound.close()
        inbound.close()
        segment.close()


__all__ = ["BACKENDS", "InboundEvent", "OutboundEvent", "Rig", "rig"]
