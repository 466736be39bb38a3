"""Decode's side of one ticket, as a pure machine.

    GRANTED --Write--> WRITING --Seal, fenced--> SEALED --commit--> COMMITTED
       |                  +--Seal, not fenced--> SEALING --fenced--> SEALED
       |                  |
       +------------------+---- wrong, expired, revoked ----> LOST (fenced)
                                                     or ----> QUARANTINED --fenced--> LOST

SEALED is the node's to decide, by `commit` or `revoke`, and nothing else moves it: the node may be committing at this
very moment, and the writer, whatever became of it, can change nothing any more.

`fence` is called to shut the writer out for good. It answers True when that is proven: at once for a
two-sided backend, whose bytes land by decode's own hand, and for a one-sided one when the ticket's fence byte
was obtained (baton/fence.py). No input of this machine moves QUARANTINED on but a call of `fence` that
answered True.

Methods return what is to be done, in order: frames for the writer, events for the node, and Ignored for
inputs that change nothing and are only counted. COMMITTED and LOST are absorbing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    HandoffFailed,
    Incomplete,
    LayoutMismatch,
    LeaseExpired,
    Stale,
    from_peer,
)
from baton.types import Ticket
from kv_transfer.core import frames
from kv_transfer.core.events import Fenced, InboundEvent, Lost, Sealed, SealInfo, Started
from kv_transfer.core.slabs import Grid, manifest_digest

NEVER = float("inf")


class LandingState(Enum):
    GRANTED = "granted"
    WRITING = "writing"
    SEALING = "sealing"
    SEALED = "sealed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    LOST = "lost"


IN_DOUBT = frozenset({LandingState.GRANTED, LandingState.WRITING, LandingState.SEALING})
LIVE = IN_DOUBT | {LandingState.SEALED}
AWAITING_FENCE = frozenset({LandingState.SEALING, LandingState.QUARANTINED})
ENDED = frozenset({LandingState.COMMITTED, LandingState.LOST})
_FILLING = frozenset({LandingState.GRANTED, LandingState.WRITING})


@dataclass(frozen=True, slots=True)
class Ignored:
    """An input that changed nothing."""

    reason: str


Output = frames.ToWriter | InboundEvent | Ignored


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """What a hand-off's geometry is checked against."""

    num_layers: int
    num_heads: int
    slab_bytes: int


@dataclass(slots=True)
class Landing:
    ticket: Ticket
    shape: ArenaShape
    fence: Callable[[], bool]
    credit: int  # bytes
    progress_timeout: float  # seconds without a slab landing, from the first Write on
    lease: float  # deadline
    state: LandingState = LandingState.GRANTED
    arrived: int = 0  # set of slabs
    bytes_landed: int = 0
    digest: int = 0
    progress: float = NEVER  # deadline
    seal_info: SealInfo | None = None
    error: BatonError | None = None
    grid: Grid = field(init=False)

    def __post_init__(self) -> None:
        first = self.ticket.first_block
        self.grid = Grid(self.shape.num_layers, first, first + len(self.ticket.offsets))

    @property
    def deadline(self) -> float:
        """When `tick` must be called, by the lease or for want of progress."""
        return min(self.lease, self.progress) if self.state in IN_DOUBT else NEVER

    # frames from the writer

    def open(self, frame: frames.Open, now: float) -> list[Output]:
        if (turned_away := self._turn_away(frame, now)) is not None:
            return turned_away
        if frame.version != frames.PROTOCOL_VERSION:
            return self._lose(
                LayoutMismatch(f"the writer speaks transfer protocol {frame.version}, decode {frames.PROTOCOL_VERSION}")
            )
        theirs, mine = (frame.num_layers, frame.slab_bytes), (self.shape.num_layers, self.shape.slab_bytes)
        if theirs != mine:
            return self._lose(LayoutMismatch(f"(layers, slab bytes) of the writer are {theirs}, decode's {mine}"))
        self._renew(now)
        return [frames.Credit(*self._ids, window=min(frame.window, self.credit))]

    def admit(self, frame: frames.Write, now: float) -> tuple[bool, list[Output]]:
        """Whether the Write's bytes may land (or, one-sided, be read back). `landed` must follow if so."""
        if (turned_away := self._turn_away(frame, now)) is not None:
            return False, turned_away
        area = frame.area
        if not self.grid.holds(area) or (frame.head, frame.heads) != (0, self.shape.num_heads):
            return False, self._lose(LayoutMismatch(f"a Write of {area}, heads {frame.head}+{frame.heads}"))
        if frame.size != area.slabs * self.shape.slab_bytes:
            return False, self._lose(
                LayoutMismatch(f"{frame.size} bytes for {area.slabs} slabs of {self.shape.slab_bytes}")
            )
        bits = self.grid.bits(area)
        if bits & self.arrived == bits:
            return False, [Ignored("duplicate")]
        if bits & self.arrived:
            return False, self._lose(Incomplete(f"a Write of {area} overlaps what has landed"))
        return True, []

    def landed(self, frame: frames.Write, checksum_right: bool, now: float) -> list[Output]:
        """The bytes of an admitted Write are in place, or were found wrong."""
        if not checksum_right:
            return self._lose(ChecksumMismatch(f"the checksum of {frame.area} is wrong"))
        area = frame.area
        outputs: list[Output] = []
        if self.state is LandingState.GRANTED:
            self.state = LandingState.WRITING
            outputs.append(Started(self.ticket.id))
        self.arrived |= self.grid.bits(area)
        self.bytes_landed += frame.size
        self.digest = manifest_digest(self.digest, area, frame.checksum)
        self.progress = now + self.progress_timeout
        self._renew(now)
        return [*outputs, frames.Landed(*self._ids, area.layer, area.layers, area.block, area.blocks)]

    def seal(self, frame: frames.Seal, now: float) -> list[Output]:
        if self.state is LandingState.COMMITTED and self.is_ours(frame):
            return [frames.Committed(*self._ids)]
        if (turned_away := self._turn_away(frame, now)) is not None:
            return turned_away
        if not self._is_complete():
            return self._lose(Incomplete(f"sealed with {self.arrived.bit_count()} of {self.grid.slabs} slabs landed"))
        if (frame.slabs, frame.size, frame.digest) != (self.grid.slabs, self.bytes_landed, self.digest):
            return self._lose(Incomplete(f"the manifest ({frame.slabs} slabs, {frame.size} bytes) is not what landed"))
        self.seal_info = SealInfo(frame.emitted, frame.score)
        self.state = LandingState.SEALING
        return self._try_to_seal()

    def abort(self, frame: frames.Abort) -> list[Output]:
        if self.state is LandingState.COMMITTED and self.is_ours(frame):
            return [Ignored("late"), frames.Committed(*self._ids)]
        if self.state is LandingState.SEALED and self.is_ours(frame):
            return [Ignored("late")]  # its answer is the node's decision
        if not self.is_ours(frame) or self.state not in IN_DOUBT:
            return self._refuse(frame)
        return self._lose(from_peer(frame.code, frame.message))

    def renew(self, frame: frames.Renew, now: float) -> list[Output]:
        if self.is_ours(frame) and self.state is LandingState.SEALED:
            return []  # there is nothing left to renew: the answer to Seal is on its way
        if (turned_away := self._turn_away(frame, now)) is not None:
            return turned_away
        self._renew(now)
        return []

    # the node's own calls

    def commit(self) -> list[Output]:
        if self.state is not LandingState.SEALED:
            return [Ignored("commit")]
        self.state = LandingState.COMMITTED
        return [frames.Committed(*self._ids)]

    def revoke(self, error: BatonError) -> list[Output]:
        return self._lose(error) if self.state in LIVE else [Ignored("revoke")]

    def tick(self, now: float) -> list[Output]:
        """A timer fired: end what has expired, try again to fence what waits for it."""
        if self._expired(now):
            return self._expire(now)
        if self.state is LandingState.SEALING:
            return self._try_to_seal()
        if self.state is LandingState.QUARANTINED and self.fence():
            self.state = LandingState.LOST
            return [Fenced(self.ticket.id)]
        return []

    def forget_slabs(self) -> None:
        """It has ended: keep only what late frames are answered with."""
        self.ticket = replace(self.ticket, offsets=())
        self.arrived, self.seal_info = 0, None

    # the rules

    def is_ours(self, frame: frames.Frame) -> bool:
        """Whether a frame is of this ticket's attempt and of both ends' present lives."""
        return (frame.writer, frame.decode, frame.attempt) == (
            self.ticket.writer,
            self.ticket.decode.incarnation,
            self.ticket.key.attempt,
        )

    def _expired(self, now: float) -> bool:
        return now >= self.deadline

    def _is_complete(self) -> bool:
        return self.arrived == self.grid.everything

    def _turn_away(self, frame: frames.Frame, now: float) -> list[Output] | None:
        """What every frame must pass; None lets it in."""
        if not self.is_ours(frame):
            return self._refuse(frame)
        if self._expired(now):
            return self._expire(now)
        if self.state in _FILLING:
            return None
        if self.state in LIVE or self.state is LandingState.COMMITTED:
            return [Ignored("late")]
        return self._refuse(frame)

    def _refuse(self, frame: frames.Frame) -> list[Output]:
        """Answer a frame of another life, or of a hand-off that is over, without touching this one."""
        error = self.error or Stale("the ticket is for another incarnation or attempt")
        return [
            Ignored("stale"),
            frames.Refused(frame.ticket, frame.attempt, frame.writer, frame.decode, error.code, error.message[:512]),
        ]

    def _try_to_seal(self) -> list[Output]:
        if not self.fence():
            return []
        assert self.seal_info is not None
        self.state = LandingState.SEALED
        return [Sealed(self.ticket.id, self.seal_info, self.bytes_landed)]

    def _expire(self, now: float) -> list[Output]:
        if now >= self.lease:
            return self._lose(LeaseExpired(f"ticket not renewed within its {self.ticket.ttl} s (ticket_ttl)"))
        return self._lose(HandoffFailed(f"no slab landed for {self.progress_timeout} s (progress_timeout)"))

    def _lose(self, error: BatonError) -> list[Output]:
        self.error = error.with_traceback(None)  # whose frames would hold payloads for as long as this is remembered
        fenced = self.state is LandingState.SEALED or self.fence()
        self.state = LandingState.LOST if fenced else LandingState.QUARANTINED
        refused = frames.Refused(*self._ids, code=error.code, message=error.message[:512])
        return [refused, Lost(self.ticket.id, error, fenced)]

    def _renew(self, now: float) -> None:
        self.lease = max(self.lease, now + self.ticket.ttl)

    @property
    def _ids(self) -> tuple[str, int, str, str]:
        return self.ticket.id, self.ticket.key.attempt, self.ticket.writer, self.ticket.decode.incarnation
