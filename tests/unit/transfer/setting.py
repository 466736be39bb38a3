"""What is explored: the size of the world, what may go wrong in it, and which machines live there."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.types import (
    Incarnation,
)
from kv_transfer.core import frames
from kv_transfer.core.departure import Departure, Pace
from kv_transfer.core.landing import Landing

SLAB = 8  # bytes
LATE = 1e9  # after every lease
DECODE = Incarnation("decode")

Tag = tuple[int, int, int]  # writer, layer, logical block
ONE_SLAB = Pace(max_payload=SLAB, layers_per_message=1, window=1 << 20, renew_interval=1.0, answer_timeout=1.0)
EMPTY: Tag = (-1, -1, -1)
TORN: Tag = (-2, -2, -2)


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True)
class Setting:
    """What is explored. `faults` is how many of crash, link loss, duplicate, corrupt and drop may happen in all."""

    layers: int = 2
    blocks: int = 2
    attempts: int = 2
    one_sided: bool = True
    faults: int = 1
    fault_kinds: frozenset[str] = frozenset({"crash", "cut", "duplicate", "corrupt", "drop"})
    ghost: bool = False  # a life of writer 0 that should be dead has the ticket too
    held: int = 0  # blocks at the front that decode has already
    pace: Pace = ONE_SLAB
    landing: type[Landing] = Landing
    departure: type[Departure] = Departure
    chunks: tuple[int, ...] = ()  # blocks per chunk; one chunk of all by default
    endings: int = 2  # how often a role aborts or revokes, a lease passes or a writer gives up waiting, in all
    slow_acks: bool = False  # Credit and Landed travel like any frame, instead of arriving at once


class Sent(NamedTuple):
    """A frame under way; `content` is the inline payload, slab by slab."""

    frame: frames.Frame
    content: tuple[Tag, ...] | None = None


GHOST = 9  # a life of writer 0 that should be dead
