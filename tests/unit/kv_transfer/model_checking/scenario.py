"""What is explored: the size of the world, what may go wrong in it, and which machines live
there."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.types import Incarnation
from kv_transfer.core import frames
from kv_transfer.core.inbound_handoff import InboundHandoff
from kv_transfer.core.outbound_handoff import OutboundHandoff
from kv_transfer.core.send_queue import SendSettings

SLAB_BYTES = 8  # bytes
AFTER_EVERY_LEASE = 1e9  # after every lease
DECODE_INCARNATION = Incarnation("decode")

SlabTag = tuple[int, int, int]  # writer, layer, logical block
ONE_SLAB_PER_MESSAGE = SendSettings(
    max_payload_bytes=SLAB_BYTES,
    layers_per_message=1,
    window_bytes=1 << 20,
    renew_interval=1.0,
    answer_timeout=1.0,
)
EMPTY_SLAB: SlabTag = (-1, -1, -1)
TORN_SLAB: SlabTag = (-2, -2, -2)


class InvariantViolation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True)
class Scenario:
    """What is explored. `max_faults` is how many of crash, link loss, duplicate, corrupt and drop
    may happen in all."""

    num_layers: int = 2
    num_blocks: int = 2
    max_attempts: int = 2
    is_one_sided: bool = True
    max_faults: int = 1
    fault_kinds: frozenset[str] = frozenset({"crash", "cut", "duplicate", "corrupt", "drop"})
    has_ghost_writer: bool = False  # a life of writer 0 that should be dead has the ticket too
    blocks_held_by_decode: int = 0  # blocks at the front that decode has already
    send_settings: SendSettings = ONE_SLAB_PER_MESSAGE
    inbound_class: type[InboundHandoff] = InboundHandoff
    outbound_class: type[OutboundHandoff] = OutboundHandoff
    blocks_per_chunk: tuple[int, ...] = ()  # blocks per chunk; one chunk of all by default
    max_endings: int = (
        2  # how often a role aborts or revokes, a lease passes or a writer gives up waiting, in all
    )
    has_slow_acks: bool = (
        False  # Credit and Landed travel like any frame, instead of arriving at once
    )


class FrameInFlight(NamedTuple):
    """A frame under way; `content` is the inline payload, slab by slab."""

    frame: frames.Frame
    content: tuple[SlabTag, ...] | None = None


GHOST_WRITER = 9  # a life of writer 0 that should be dead
