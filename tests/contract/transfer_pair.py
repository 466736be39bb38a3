"""Both planes over one transport, each with an arena, and helpers to complete a hand-off.

There is no node and no model.
"""

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
from baton.kv.blocks import KVLayout
from baton.process.failpoints import Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
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
    TokenLogprobs,
    mint_id,
)
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.factory import build_kv_receiver, build_kv_sender
from kv_transfer.plane import (
    InboundFenced,
    InboundLost,
    InboundPlane,
    InboundSealed,
    InboundStarted,
    OutboundAborted,
    OutboundCommitted,
    OutboundPlane,
    SealInfo,
)
from tests.contract.device_pair import DevicePairFactory, make_host_pair

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
TOKEN = "the cluster's token"
BACKENDS = ("memory", "shm", "zmq", "grpc", "cuda_ipc")
ONE_SIDED = ("shm", "cuda_ipc")
FAST_SETTINGS = TransferSettings(
    ticket_ttl=5.0,
    progress_timeout=5.0,
    renew_interval=0.5,
    fence_retry_interval=0.02,
    link_timeout=2.0,
)
TIMEOUT_SECONDS = 30.0  # only a failing test waits this long
POISON_BYTE = 0xA5
SEAL_INFO = SealInfo((17,), TokenLogprobs(-0.5, ((17, -0.5), (3, -1.25))))
_SKIPPED_EVENTS = (InboundStarted,)

E = TypeVar("E")


@dataclass
class DevicePairs:
    """Makes the devices of pairs over cuda_ipc; tests on a GPU replace `make`."""

    make: DevicePairFactory = make_host_pair


DEVICE_PAIRS = DevicePairs()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    pause, deadline = threading.Event(), time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        pause.wait(0.005)


class EventQueue(queue.SimpleQueue[object]):
    """The events of one plane."""

    def expect_event(self, kind: type[E]) -> E:
        """The next event, which must be of this kind.

        InboundStarted is skipped unless it is expected."""
        while True:
            event = self.get(timeout=TIMEOUT_SECONDS)
            if isinstance(event, kind):
                return event
            assert isinstance(event, _SKIPPED_EVENTS), f"got {event}, expected {kind.__name__}"

    def drain_unexpected(self) -> list[object]:
        """The events that are there now, but for those that are always skipped."""
        found = []
        while not self.empty():
            event = self.get()
            if not isinstance(event, _SKIPPED_EVENTS):
                found.append(event)
        return found


@dataclass(repr=False)
class TransferPair:
    """A KVSender and a KVReceiver with their arenas and events."""

    backend: str
    folder: Path
    layout: KVLayout
    settings: TransferSettings
    inbound: InboundPlane
    outbound: OutboundPlane
    decode_events: EventQueue
    prefill_events: EventQueue
    decode_arena: NDArray[Any]  # [block][layer][byte], POISON_BYTE at first
    prefill_arena: NDArray[Any]  # likewise, random
    decode_address: PeerAddress
    writer_incarnation: Incarnation
    segment: SegmentRef
    writer_name: str  # of the process that holds `outbound`, if a device writes for it

    def new_key(self, attempt: int = 0) -> AttemptKey:
        return AttemptKey(RequestId(mint_id()), attempt, 0)

    def make_ticket(
        self, key: AttemptKey, blocks: list[int], first_block: int = 0, ttl: float | None = None
    ) -> Ticket:
        return Ticket(
            id=TicketId(mint_id()),
            key=key,
            decode_peer=self.decode_address,
            writer_incarnation=self.writer_incarnation,
            first_block=first_block,
            block_offsets=tuple(block * self.layout.block_bytes for block in blocks),
            num_tokens=(first_block + len(blocks)) * self.layout.block_size,
            ttl_seconds=ttl or self.settings.ticket_ttl,
            transport=self.backend,
            segment=self.segment,
            fence_byte=self.inbound.allocate_fence_byte(),
        )

    def grant_ticket(
        self, key: AttemptKey, blocks: list[int], first_block: int = 0, ttl: float | None = None
    ) -> Ticket:
        ticket = self.make_ticket(key, blocks, first_block, ttl)
        self.inbound.grant_ticket(ticket)
        return ticket

    def open_handoff(self, blocks: int, attempt: int = 0) -> AttemptKey:
        key = self.new_key(attempt)
        self.outbound.open_handoff(key, blocks * self.layout.block_size)
        return key

    def announce_layers(
        self, key: AttemptKey, source: list[int], first: int = 0, layers: list[int] | None = None
    ) -> None:
        for layer in range(self.layout.num_layers) if layers is None else layers:
            self.outbound.announce_layer(key, layer, first, [BlockIndex(block) for block in source])

    def start_handoff(
        self, source: list[int], target: list[int], first_block: int = 0
    ) -> tuple[AttemptKey, Ticket]:
        """Everything up to and including Seal, as a prefill node does it."""
        key = self.open_handoff(len(source))
        ticket = self.grant_ticket(key, target, first_block)
        self.outbound.set_ticket(key, ticket)
        self.announce_layers(key, source)
        self.outbound.seal_handoff(key, SEAL_INFO)
        return key, ticket

    def finish_handoff(self, ticket: Ticket) -> OutboundCommitted:
        """Commit a sealed hand-off, and wait for both sides."""
        assert self.decode_events.expect_event(InboundSealed).ticket_id == ticket.id
        self.inbound.commit_ticket(ticket.id)
        return self.prefill_events.expect_event(OutboundCommitted)

    def check_full_handoff(self) -> None:
        """A whole hand-off still works, checked byte by byte."""
        source, target = [30, 28, 29], [31, 27, 26]
        key, ticket = self.start_handoff(source, target)
        assert self.finish_handoff(ticket).key == key
        assert self.has_arrived(source, target)

    def expect_lost_and_fenced(self, ticket: Ticket, error: type[BatonError]) -> None:
        """Expect that decode gives the ticket up for `error`, and that its writer cannot write to
        these blocks any more: at once, or a little later."""
        event = self.decode_events.expect_event(InboundLost)
        assert (event.ticket_id, type(event.error)) == (ticket.id, error), event
        if not event.is_fenced:
            assert self.decode_events.expect_event(InboundFenced).ticket_id == ticket.id

    def expect_lost(self, ticket: Ticket, error: type[BatonError], *, fenced: bool = True) -> None:
        event = self.decode_events.expect_event(InboundLost)
        assert (event.ticket_id, type(event.error), event.is_fenced) == (
            ticket.id,
            error,
            fenced,
        ), event

    def expect_aborted(self, key: AttemptKey, error: type[BatonError]) -> None:
        event = self.prefill_events.expect_event(OutboundAborted)
        assert (event.key, type(event.error)) == (key, error), event

    def has_arrived(self, source: list[int], target: list[int]) -> bool:
        return bool(np.array_equal(self.decode_arena[target], self.prefill_arena[source]))

    def is_untouched(self, target: list[int]) -> bool:
        return bool((self.decode_arena[target] == POISON_BYTE).all())


@contextmanager
def transfer_pair(
    backend: str,
    folder: Path,
    *,
    settings: TransferSettings = FAST_SETTINGS,
    outbound_settings: TransferSettings | None = None,
    outbound_token: str = TOKEN,
    outbound_folder: Path | None = None,
    outbound_host: str = "",
    blocks: int = 32,
    layout: KVLayout = LAYOUT,
    failpoints: str = "",
    make_devices: DevicePairFactory | None = None,
) -> Iterator[TransferPair]:
    """Both planes over `backend`. `outbound_*` are given where the writer's value differs."""
    settings = replace(settings, transport=backend, segment_folder=folder)
    arena = create_segment(
        folder, "arena", round_up_segment_bytes(blocks * layout.block_bytes, layout.block_bytes)
    )
    target = np.frombuffer(arena.view, dtype=np.uint8)[: blocks * layout.block_bytes]
    target[:] = POISON_BYTE
    source = np.random.default_rng(7).integers(0, 256, blocks * layout.block_bytes, dtype=np.uint8)
    decode_events, prefill_events = EventQueue(), EventQueue()
    points = Failpoints(failpoints)
    decode, writer = Incarnation(mint_id(64)), Incarnation(mint_id(64))
    make_devices = make_devices or DEVICE_PAIRS.make
    is_by_device = backend == CUDA_IPC
    devices = make_devices(layout, folder, arena, target, source) if is_by_device else None
    inbound = build_kv_receiver(
        arena=arena.view,
        layout=layout,
        incarnation=decode,
        token=TOKEN,
        fences=ArenaFences(arena.path),
        emit=decode_events.put,
        settings=settings,
        failpoints=points,
        device=devices.decode if devices else None,
    )
    outbound = build_kv_sender(
        arena=source.data,
        layout=layout,
        incarnation=writer,
        token=outbound_token,
        host_id=outbound_host,
        emit=prefill_events.put,
        settings=replace(
            outbound_settings or settings,
            transport=backend,
            segment_folder=outbound_folder or folder,
        ),
        failpoints=points,
        device=devices.prefill if devices else None,
    )
    shape = (-1, layout.num_layers, layout.slab_bytes)
    try:
        yield TransferPair(
            backend=backend,
            folder=folder,
            layout=layout,
            settings=settings,
            inbound=inbound,
            outbound=outbound,
            decode_events=decode_events,
            prefill_events=prefill_events,
            decode_arena=devices.decode_arena if devices else target.reshape(shape),
            prefill_arena=devices.prefill_arena if devices else source.reshape(shape),
            decode_address=PeerAddress(NodeName("decode-0"), decode, "host", inbound.endpoint),
            writer_incarnation=writer,
            segment=SegmentRef(arena.name, decode),
            writer_name=devices.prefill.writer_name if devices else "",
        )
    finally:
        outbound.close()
        inbound.close()
        if devices is not None:
            devices.close()
        arena.close()
