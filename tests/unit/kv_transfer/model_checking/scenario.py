"""What is explored: the size of the world, its faults, and the classes of its machines."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.types import Incarnation
from kv_transfer.core import frames
from kv_transfer.core.inbound_handoff import InboundHandoff
from kv_transfer.core.outbound_handoff import OutboundHandoff
from kv_transfer.core.send_queue import SendSettings

SLAB_BYTES = 8
AFTER_EVERY_LEASE = 1e9  # a time at which every lease has expired
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
    """The world has reached a state that must be unreachable."""


@dataclass(frozen=True)
class Scenario:
    """The world to explore."""

    num_layers: int = 2
    num_blocks: int = 2
    max_attempts: int = 2
    is_one_sided: bool = True
    # Whether a device writes for the writers: it goes on when their processes have crashed.
    has_devices: bool = False
    fences_by_lock_alone: bool = False  # a planted bug: no proof that the device has stopped
    max_faults: int = 1  # of all kinds together
    fault_kinds: frozenset[str] = frozenset({"crash", "cut", "duplicate", "corrupt", "drop"})
    has_ghost_writer: bool = False  # an earlier incarnation of writer 0 has the ticket too
    blocks_held_by_decode: int = 0  # first blocks of the context that decode has already
    send_settings: SendSettings = ONE_SLAB_PER_MESSAGE
    inbound_class: type[InboundHandoff] = InboundHandoff
    outbound_class: type[OutboundHandoff] = OutboundHandoff
    blocks_per_chunk: tuple[int, ...] = ()  # blocks per chunk; one chunk of all by default
    # How many aborts, revocations, expired leases and time-outs of writers may happen in all.
    max_endings: int = 2
    has_slow_acks: bool = False  # Credit and Landed take time to arrive, like other frames


class FrameInFlight(NamedTuple):
    """A frame on its way."""

    frame: frames.Frame
    content: tuple[SlabTag, ...] | None = None  # of the inline payload, slab by slab


GHOST_WRITER = 9  # the number of writer 0's earlier incarnation
