"""Two planes and two arenas of one backend, and what it takes to see a hand-off through. No node, no model."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.errors import BatonError
from baton.failpoints import Failpoints
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from baton.segment import create, segment_bytes
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
    TokenScore,
    mint_id,
)
from kv_transfer.factory import build_inbound, build_outbound
from kv_transfer.plane import (
    Aborted,
    Committed,
    InboundPlane,
    LayerLanded,
    Lost,
    OutboundPlane,
    Sealed,
    SealInfo,
    Started,
)
from kv_transfer.settings import TransferSettings

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
TOKEN = "the cluster's token"
BACKENDS = ("memory", "shm", "zmq")
QUICK = TransferSettings(ticket_ttl=5.0, progress_timeout=5.0, renew_interval=0.5, fence_retry=0.02, link_timeout=2.0)
PATIENCE = 30.0  # seconds; only a failing test waits so long
POISON = 0xA5
SEAL = SealInfo((17,), TokenScore(-0.5, ((17, -0.5), (3, -1.25))))
_PASSED_OVER = (LayerLanded, Started)

E = TypeVar("E")


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that no event announces."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came to be"
        pause.wait(0.005)


class Inbox(queue.SimpleQueue[object]):
    def expect(self, kind: type[E]) -> E:
        """The next event, which must be of this kind; LayerLanded and Started are passed over unless asked for."""
        while True:
            event = self.get(timeout=PATIENCE)
            if isinstance(event, kind):
                return event
            assert isinstance(event, _PASSED_OVER), f"{event} came, {kind.__name__} was expected"

    def rest(self) -> list[object]:
        """What is there now and was not asked for."""
        found = []
        while not self.empty():
            event = self.get()
            if not isinstance(event, _PASSED_OVER):
                found.append(event)
        return found


@dataclass(repr=False)
class Rig:
    backend: str
    folder: Path
    layout: KVLayout
    settings: TransferSettings
    inbound: InboundPlane
    outbound: OutboundPlane
    decode_events: Inbox
    prefill_events: Inbox
    target: NDArray[Any]  # decode's arena, [block][layer][byte], poisoned at first
    source: NDArray[Any]  # prefill's arena, random
    decode: PeerAddress
    writer: Incarnation
    segment: SegmentRef

    def key(self, attempt: int = 0) -> AttemptKey:
        return AttemptKey(RequestId(mint_id()), attempt, 0)

    def ticket(self, key: AttemptKey, blocks: list[int], first_block: int = 0, ttl: float | None = None) -> Ticket:
        return Ticket(
            id=TicketId(mint_id()),
            key=key,
            decode=self.decode,
            writer=self.writer,
            first_block=first_block,
            offsets=tuple(block * self.layout.block_bytes for block in blocks),
            num_tokens=(first_block + len(blocks)) * self.layout.block_size,
            ttl=ttl or self.settings.ticket_ttl,
            transport=self.backend,
            segment=self.segment,
            fence=self.inbound.mint_fence(),
        )

    def granted(self, key: AttemptKey, blocks: list[int], first_block: int = 0, ttl: float | None = None) -> Ticket:
        ticket = self.ticket(key, blocks, first_block, ttl)
        self.inbound.grant(ticket)
        return ticket

    def opened(self, blocks: int, attempt: int = 0) -> AttemptKey:
        key = self.key(attempt)
        self.outbound.open(key, blocks * self.layout.block_size)
        return key

    def announce(self, key: AttemptKey, source: list[int], first: int = 0, layers: list[int] | None = None) -> None:
        for layer in range(self.layout.num_layers) if layers is None else layers:
            self.outbound.layer_ready(key, layer, first, [BlockIndex(block) for block in source])

    def hand_off(self, source: list[int], target: list[int], first_block: int = 0) -> tuple[AttemptKey, Ticket]:
        """Everything up to and including seal, as a prefill node would do it."""
        key = self.opened(len(source))
        ticket = self.granted(key, target, first_block)
        self.outbound.ticket(key, ticket)
        self.announce(key, source)
        self.outbound.seal(key, SEAL)
        return key, ticket

    def finish(self, ticket: Ticket) -> Committed:
        """From Sealed to Committed on both sides."""
        assert self.decode_events.expect(Sealed).ticket == ticket.id
        self.inbound.commit(ticket.id)
        return self.prefill_events.expect(Committed)

    def works(self) -> None:
        """A whole hand-off, checked byte by byte: nothing that came before has done lasting harm."""
        source, target = [30, 28, 29], [31, 27, 26]
        key, ticket = self.hand_off(source, target)
        assert self.finish(ticket).key == key
        assert self.arrived(source, target)

    def lost(self, ticket: Ticket, error: type[BatonError], *, fenced: bool = True) -> None:
        event = self.decode_events.expect(Lost)
        assert (event.ticket, type(event.error), event.fenced) == (ticket.id, error, fenced), event

    def aborted(self, key: AttemptKey, error: type[BatonError]) -> None:
        event = self.prefill_events.expect(Aborted)
        assert (event.key, type(event.error)) == (key, error), event

    def arrived(self, source: list[int], target: list[int]) -> bool:
        return bool(np.array_equal(self.target[target], self.source[source]))

    def untouched(self, target: list[int]) -> bool:
        return bool((self.target[target] == POISON).all())


@contextmanager
def rig(
    backend: str,
    folder: Path,
    *,
    settings: TransferSettings = QUICK,
    outbound_settings: TransferSettings | None = None,
    outbound_token: str = TOKEN,
    outbound_folder: Path | None = None,
    outbound_host: str = "",
    blocks: int = 32,
    layout: KVLayout = LAYOUT,
    failpoints: str = "",
) -> Iterator[Rig]:
    """`outbound_*` only where the writer differs."""
    settings = replace(settings, transport=backend, segment_folder=folder)
    arena = create(folder, "arena", segment_bytes(blocks * layout.block_bytes, layout.block_bytes))
    target = np.frombuffer(arena.view, dtype=np.uint8)[: blocks * layout.block_bytes]
    target[:] = POISON
    source = np.random.default_rng(7).integers(0, 256, blocks * layout.block_bytes, dtype=np.uint8)
    decode_events, prefill_events = Inbox(), Inbox()
    points = Failpoints(failpoints)
    decode, writer = Incarnation(mint_id(64)), Incarnation(mint_id(64))
    inbound = build_inbound(
        arena=arena.view,
        layout=layout,
        incarnation=decode,
        token=TOKEN,
        fences=ArenaFences(arena.path),
        emit=decode_events.put,
        settings=settings,
        failpoints=points,
    )
    outbound = build_outbound(
        arena=source.data,
        layout=layout,
        incarnation=writer,
        token=outbound_token,
        host_id=outbound_host,
        emit=prefill_events.put,
        settings=replace(outbound_settings or settings, transport=backend, segment_folder=outbound_folder or folder),
        failpoints=points,
    )
    shape = (-1, layout.num_layers, layout.slab_bytes)
    try:
        yield Rig(
            backend=backend,
            folder=folder,
            layout=layout,
            settings=settings,
            inbound=inbound,
            outbound=outbound,
            decode_events=decode_events,
            prefill_events=prefill_events,
            target=target.reshape(shape),
            source=source.reshape(shape),
            decode=PeerAddress(NodeName("decode-0"), decode, "host", inbound.endpoint),
            writer=writer,
            segment=SegmentRef(arena.name, decode),
        )
    finally:
        outbound.close()
        inbound.close()
        arena.close()
