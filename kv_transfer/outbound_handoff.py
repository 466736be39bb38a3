"""One hand-off as prefill's plane holds it: its machine, whom it is for, and who waits for its layers."""

import threading
from dataclasses import dataclass, field

import xxhash

from baton.types import Incarnation
from kv_transfer.core import departure
from kv_transfer.core.departure import Departure, Outgoing
from kv_transfer.inbound_plane import flipped
from kv_transfer.peer_arena import PeerArena
from kv_transfer.slab_rows import SlabRows

Peer = tuple[str, Incarnation]  # endpoint and incarnation: an address alone is no identity


@dataclass(slots=True)
class Waiter:
    """A thread in `wait_landed`."""

    layer: int
    done: threading.Event = field(default_factory=threading.Event)
    landed: bool = False


@dataclass(slots=True)
class Handoff:
    """Used on the plane's thread only."""

    machine: Departure
    peer: Peer | None = None
    arena: PeerArena | None = None  # the peer's, if its blocks are written in place
    waiters: list[Waiter] = field(default_factory=list)

    def move(self, slabs: SlabRows, outgoing: Outgoing, *, corrupt: bool = False) -> tuple[memoryview, int]:
        """Read the source out of `slabs`, and put it into the peer's arena if that is mapped. Returns (payload,
        checksum); `corrupt` damages what is moved, after its checksum was taken."""
        payload = slabs.gather(slabs.rows(outgoing.area, outgoing.source))
        checksum = xxhash.xxh3_64_intdigest(payload)
        if corrupt:
            payload = flipped(payload)
        if self.arena is not None:
            ticket = self.machine.ticket
            assert ticket is not None
            first = outgoing.area.block - ticket.first_block
            offsets = ticket.offsets[first : first + outgoing.area.blocks]
            there = self.arena.slabs
            there.scatter(there.rows(outgoing.area, [offset // slabs.block_bytes for offset in offsets]), payload)
        return payload, checksum

    def wake_waiters(self) -> None:
        """Let those go whose layer has landed, or will not."""
        ended = self.machine.state in departure.ENDED
        for waiter in list(self.waiters):
            waiter.landed = not ended and self.machine.layer_has_landed(waiter.layer)
            if waiter.landed or ended:
                self.waiters.remove(waiter)
                waiter.done.set()
