"""Decode's side of one ticket, as a state machine without I/O.

    GRANTED --Write--> WRITING --Seal, fenced--> SEALED --commit--> COMMITTED
       |                  +--Seal, not fenced--> SEALING --fenced--> SEALED
       |                  |
       +------------------+---- wrong, expired, revoked ----> LOST (fenced)
                                                     or ----> QUARANTINED --fenced--> LOST

In SEALED only the node decides, by `commit` or `revoke`: it may be committing at this moment, and
the writer can change nothing any more, whatever happens to it.

`try_fence` shuts the writer out for good. It returns True when that is proven: at once for a
two-sided transport, whose bytes decode itself copies into the arena, and for a one-sided one when
decode holds the ticket's fence byte (baton/shared_memory/fence.py). QUARANTINED ends only when
`try_fence` has returned True.

Methods return what to do, in order: frames for the writer, events for the node, and IgnoredInput
for inputs that change nothing and are only counted. COMMITTED and LOST are final.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    HandoffFailed,
    IncompleteTransfer,
    LayoutMismatch,
    LeaseExpired,
    StaleMessage,
    handoff_error_from_peer,
)
from baton.types import Ticket
from kv_transfer.core import frames
from kv_transfer.core.events import (
    InboundEvent,
    InboundFenced,
    InboundLost,
    InboundSealed,
    InboundStarted,
    SealInfo,
)
from kv_transfer.core.handoff_common import NEVER, ArenaShape, IgnoredInput
from kv_transfer.core.slabs import SlabGrid, extend_manifest_digest


class InboundState(Enum):
    GRANTED = "granted"
    WRITING = "writing"
    SEALING = "sealing"
    SEALED = "sealed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    LOST = "lost"


UNSEALED_STATES = frozenset({InboundState.GRANTED, InboundState.WRITING, InboundState.SEALING})
LIVE_STATES = UNSEALED_STATES | {InboundState.SEALED}
AWAITING_FENCE_STATES = frozenset({InboundState.SEALING, InboundState.QUARANTINED})
TERMINAL_STATES = frozenset({InboundState.COMMITTED, InboundState.LOST})
_WRITABLE_STATES = frozenset({InboundState.GRANTED, InboundState.WRITING})


InboundOutput = frames.FrameToWriter | InboundEvent | IgnoredInput


@dataclass(slots=True)
class InboundHandoff:
    """One ticket. Sets of slabs are bit masks over `grid`; times are on the plane's clock."""

    ticket: Ticket
    shape: ArenaShape
    try_fence: Callable[[], bool]
    credit_bytes: int  # may be sent and not yet landed
    progress_timeout: float  # seconds without a slab landing, once one has landed
    lease_deadline: float  # moved on by Renew and by every slab that lands
    state: InboundState = InboundState.GRANTED
    landed_slabs: int = 0
    bytes_landed: int = 0
    manifest_digest: int = 0
    progress_deadline: float = NEVER
    seal_info: SealInfo | None = None
    error: BatonError | None = None
    grid: SlabGrid = field(init=False)

    def __post_init__(self) -> None:
        first = self.ticket.first_block
        self.grid = SlabGrid(self.shape.num_layers, first, first + len(self.ticket.block_offsets))

    @property
    def deadline(self) -> float:
        """When `tick` must be called: the lease expires, or progress is overdue."""
        return (
            min(self.lease_deadline, self.progress_deadline)
            if self.state in UNSEALED_STATES
            else NEVER
        )

    # frames from the writer

    def on_open(self, frame: frames.OpenFrame, now: float) -> list[InboundOutput]:
        if (answer := self._screen_frame(frame, now)) is not None:
            return answer
        if not frames.OLDEST_WRITER_VERSION <= frame.version <= frames.PROTOCOL_VERSION:
            return self._lose(
                LayoutMismatch(
                    f"the writer speaks transfer protocol {frame.version}, "
                    f"decode {frames.OLDEST_WRITER_VERSION} to {frames.PROTOCOL_VERSION}"
                )
            )
        writer_shape = (frame.num_layers, frame.slab_bytes)
        decode_shape = (self.shape.num_layers, self.shape.slab_bytes)
        if writer_shape != decode_shape:
            return self._lose(
                LayoutMismatch(
                    f"(layers, slab bytes) of the writer are {writer_shape}, "
                    f"decode's {decode_shape}"
                )
            )
        self._renew_lease(now)
        return [
            frames.CreditFrame(
                *self._frame_ids, window_bytes=min(frame.window_bytes, self.credit_bytes)
            )
        ]

    def check_write(self, frame: frames.WriteFrame, now: float) -> tuple[bool, list[InboundOutput]]:
        """Whether the Write's bytes may land or, if one-sided, be read back from the arena.

        If so, `finish_write` must follow."""
        if (answer := self._screen_frame(frame, now)) is not None:
            return False, answer
        slab_range = frame.slab_range
        if not self.grid.contains(slab_range) or (frame.first_kv_head, frame.num_kv_heads) != (
            0,
            self.shape.num_kv_heads,
        ):
            return False, self._lose(
                LayoutMismatch(
                    f"a Write of {slab_range}, heads {frame.first_kv_head}+{frame.num_kv_heads}"
                )
            )
        if frame.payload_bytes != slab_range.num_slabs * self.shape.slab_bytes:
            return False, self._lose(
                LayoutMismatch(
                    f"{frame.payload_bytes} bytes for {slab_range.num_slabs} slabs "
                    f"of {self.shape.slab_bytes}"
                )
            )
        bits = self.grid.bitmask(slab_range)
        if bits & self.landed_slabs == bits:
            return False, [IgnoredInput("duplicate")]
        if bits & self.landed_slabs:
            return False, self._lose(
                IncompleteTransfer(f"a Write of {slab_range} overlaps slabs that have landed")
            )
        return True, []

    def finish_write(
        self, frame: frames.WriteFrame, is_checksum_right: bool, now: float
    ) -> list[InboundOutput]:
        """The bytes of an accepted Write are in the arena, or their checksum was wrong."""
        if not is_checksum_right:
            return self._lose(ChecksumMismatch(f"the checksum of {frame.slab_range} is wrong"))
        slab_range = frame.slab_range
        outputs: list[InboundOutput] = []
        if self.state is InboundState.GRANTED:
            self.state = InboundState.WRITING
            outputs.append(InboundStarted(self.ticket.id))
        self.landed_slabs |= self.grid.bitmask(slab_range)
        self.bytes_landed += frame.payload_bytes
        self.manifest_digest = extend_manifest_digest(
            self.manifest_digest, slab_range, frame.checksum
        )
        self.progress_deadline = now + self.progress_timeout
        self._renew_lease(now)
        return [
            *outputs,
            frames.LandedFrame(
                *self._frame_ids,
                slab_range.first_layer,
                slab_range.num_layers,
                slab_range.first_block,
                slab_range.num_blocks,
            ),
        ]

    def on_seal(self, frame: frames.SealFrame, now: float) -> list[InboundOutput]:
        if self.state is InboundState.COMMITTED and self.is_current_frame(frame):
            return [frames.CommittedFrame(*self._frame_ids)]
        if (answer := self._screen_frame(frame, now)) is not None:
            return answer
        if not self._is_complete():
            return self._lose(
                IncompleteTransfer(
                    f"sealed with {self.landed_slabs.bit_count()} of "
                    f"{self.grid.num_slabs} slabs landed"
                )
            )
        if (frame.num_slabs, frame.payload_bytes, frame.digest) != (
            self.grid.num_slabs,
            self.bytes_landed,
            self.manifest_digest,
        ):
            return self._lose(
                IncompleteTransfer(
                    f"the manifest ({frame.num_slabs} slabs, {frame.payload_bytes} bytes) "
                    "is not what landed"
                )
            )
        self.seal_info = SealInfo(frame.emitted_token_ids, frame.last_token_score)
        self.state = InboundState.SEALING
        return self._seal_if_fenced()

    def on_abort(self, frame: frames.AbortFrame) -> list[InboundOutput]:
        if self.state is InboundState.COMMITTED and self.is_current_frame(frame):
            return [IgnoredInput("late"), frames.CommittedFrame(*self._frame_ids)]
        if self.state is InboundState.SEALED and self.is_current_frame(frame):
            return [IgnoredInput("late")]  # commit or revoke will answer
        if not self.is_current_frame(frame) or self.state not in UNSEALED_STATES:
            return self._refusal(frame)
        return self._lose(handoff_error_from_peer(frame.code, frame.message))

    def on_renew(self, frame: frames.RenewFrame, now: float) -> list[InboundOutput]:
        if self.is_current_frame(frame) and self.state is InboundState.SEALED:
            return []  # nothing is left to renew: the answer to Seal is on its way
        if (answer := self._screen_frame(frame, now)) is not None:
            return answer
        self._renew_lease(now)
        return []

    # calls of the node

    def commit(self) -> list[InboundOutput]:
        """The node uses the blocks from now on."""
        if self.state is not InboundState.SEALED:
            return [IgnoredInput("commit")]
        self.state = InboundState.COMMITTED
        return [frames.CommittedFrame(*self._frame_ids)]

    def revoke(self, error: BatonError) -> list[InboundOutput]:
        """The node gives the ticket up, for the reason `error`."""
        return self._lose(error) if self.state in LIVE_STATES else [IgnoredInput("revoke")]

    def tick(self, now: float) -> list[InboundOutput]:
        """Lose the ticket if it has expired; try again to fence it if it waits for that."""
        if self._is_expired(now):
            return self._lose_as_expired(now)
        if self.state is InboundState.SEALING:
            return self._seal_if_fenced()
        if self.state is InboundState.QUARANTINED and self.try_fence():
            self.state = InboundState.LOST
            return [InboundFenced(self.ticket.id)]
        return []

    def discard_slabs(self) -> None:
        """Keep only what late frames are answered with. Called once the ticket has ended."""
        self.ticket = replace(self.ticket, block_offsets=())
        self.landed_slabs, self.seal_info = 0, None

    # rules

    def is_current_frame(self, frame: frames.Frame) -> bool:
        """Whether a frame is of this attempt and of the present incarnations of both ends."""
        return (frame.writer_incarnation, frame.decode_incarnation, frame.attempt) == (
            self.ticket.writer_incarnation,
            self.ticket.decode_peer.incarnation,
            self.ticket.key.attempt_number,
        )

    def _is_expired(self, now: float) -> bool:
        return now >= self.deadline

    def _is_complete(self) -> bool:
        return self.landed_slabs == self.grid.full_mask

    def _screen_frame(self, frame: frames.Frame, now: float) -> list[InboundOutput] | None:
        """Check a frame before it is processed. None accepts it; otherwise the answer to it."""
        if not self.is_current_frame(frame):
            return self._refusal(frame)
        if self._is_expired(now):
            return self._lose_as_expired(now)
        if self.state in _WRITABLE_STATES:
            return None
        if self.state in LIVE_STATES or self.state is InboundState.COMMITTED:
            return [IgnoredInput("late")]
        return self._refusal(frame)

    def _refusal(self, frame: frames.Frame) -> list[InboundOutput]:
        """Refuse a frame of another incarnation or of an ended hand-off, and change nothing."""
        error = self.error or StaleMessage("the ticket is for another incarnation or attempt")
        return [
            IgnoredInput("stale"),
            frames.RefusedFrame(*frame.ids, error.code, error.message[:512]),
        ]

    def _seal_if_fenced(self) -> list[InboundOutput]:
        if not self.try_fence():
            return []
        assert self.seal_info is not None
        self.state = InboundState.SEALED
        return [InboundSealed(self.ticket.id, self.seal_info, self.bytes_landed)]

    def _lose_as_expired(self, now: float) -> list[InboundOutput]:
        if now >= self.lease_deadline:
            return self._lose(
                LeaseExpired(
                    f"ticket not renewed within its {self.ticket.ttl_seconds} s (ticket_ttl)"
                )
            )
        return self._lose(
            HandoffFailed(f"no slab landed for {self.progress_timeout} s (progress_timeout)")
        )

    def _lose(self, error: BatonError) -> list[InboundOutput]:
        # The traceback's frames would keep payloads in memory as long as the error is kept.
        self.error = error.with_traceback(None)
        is_fenced = self.state is InboundState.SEALED or self.try_fence()
        self.state = InboundState.LOST if is_fenced else InboundState.QUARANTINED
        refused = frames.RefusedFrame(
            *self._frame_ids, code=error.code, message=error.message[:512]
        )
        return [refused, InboundLost(self.ticket.id, error, is_fenced)]

    def _renew_lease(self, now: float) -> None:
        self.lease_deadline = max(self.lease_deadline, now + self.ticket.ttl_seconds)

    @property
    def _frame_ids(self) -> tuple[str, int, str, str]:
        return (
            self.ticket.id,
            self.ticket.key.attempt_number,
            self.ticket.writer_incarnation,
            self.ticket.decode_peer.incarnation,
        )
