"""Prefill's side of one hand-off, as a state machine without I/O.

  UNTICKETED --ticket--> STREAMING --all written, seal--> SEALED --Committed--> COMMITTED
      |                     |                             |
      +---------------------+------ abort, Refused -------+--> ABORTING --last write done--> ABORTED

Until its ticket is known a hand-off is UNTICKETED and announced slabs wait in the queue.
`begin_write` takes slabs that are ready. `finish_write` reports that the source was read and, if
the writer is one-sided, that the bytes are in decode's arena. A hand-off does not end while a write
is in flight: ABORTING waits for it, so that source blocks are never released while they are read.

`lock` keeps decode from reusing the blocks while a one-sided writer writes them
(baton/shared_memory/fence.py). It is held exactly while writes are in flight, so never at Seal or
at the end. Once decode has fenced this writer off, the lock cannot be acquired again. Methods
return frames for decode, events for the node, and IgnoredInput. COMMITTED and ABORTED are final.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from baton.errors import (
    BatonError,
    IncompleteTransfer,
    PeerUnreachable,
    StaleMessage,
    handoff_error_from_peer,
)
from baton.types import AttemptKey, Incarnation, Ticket
from kv_transfer.core import frames
from kv_transfer.core.events import (
    HandoffStats,
    OutboundAborted,
    OutboundCommitted,
    OutboundEvent,
    SealInfo,
)
from kv_transfer.core.handoff_common import NEVER, ArenaShape, IgnoredInput
from kv_transfer.core.handoff_progress import HandoffProgress
from kv_transfer.core.send_queue import (
    OutgoingWrite,
    ReadyGate,
    ReadySlabs,
    SendSettings,
    split_next_write,
)
from kv_transfer.core.slabs import SlabGrid, SlabRange, extend_manifest_digest
from kv_transfer.core.writer_lock import NoLock, WriterLock


class OutboundState(Enum):
    UNTICKETED = "unticketed"
    STREAMING = "streaming"
    SEALED = "sealed"
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"


TERMINAL_STATES = frozenset({OutboundState.COMMITTED, OutboundState.ABORTED})
_OPEN_STATES = frozenset({OutboundState.UNTICKETED, OutboundState.STREAMING, OutboundState.SEALED})

OutboundOutput = frames.FrameToDecode | OutboundEvent | IgnoredInput


@dataclass(slots=True)
class OutboundHandoff:
    """One hand-off. Sets of slabs are bit masks over `grid`; times are on the plane's clock."""

    key: AttemptKey
    writer_incarnation: Incarnation
    shape: ArenaShape
    num_blocks: int  # logical blocks of the whole context
    settings: SendSettings
    host_id: str = ""
    writer_process: str = ""  # by which the end of a device's writes is proven
    state: OutboundState = OutboundState.UNTICKETED
    ticket: Ticket | None = None
    lock: WriterLock = field(default_factory=NoLock)
    writes_in_flight: int = 0
    bytes_in_flight: int = 0  # of these, about which decode knows nothing yet
    send_queue: tuple[ReadySlabs, ...] = ()
    announced_slabs: int = 0
    sent_slabs: int = 0
    landed_slabs: int = 0
    unacked_bytes: int = 0  # given out by begin_write and not yet landed
    window_bytes: int = frames.INITIAL_WINDOW_BYTES
    bytes_sent: int = 0
    manifest_digest: int = 0
    pending_seal: SealInfo | None = None
    error: BatonError | None = None
    needs_abort_frame: bool = False  # send Abort to decode once no write is in flight
    last_progress_at: float = 0.0  # when decode last answered, or was last given work to answer
    next_renewal_at: float = NEVER
    progress: HandoffProgress = field(default_factory=HandoffProgress)
    grid: SlabGrid = field(init=False)

    def __post_init__(self) -> None:
        self.grid = SlabGrid(self.shape.num_layers, 0, self.num_blocks)

    @property
    def deadline(self) -> float:
        deadline = min(self.next_renewal_at, self._answer_deadline)
        return deadline if self.state in _OPEN_STATES else NEVER

    @property
    def _answer_deadline(self) -> float:
        unanswered = self.unacked_bytes - self.bytes_in_flight
        waiting = self.state is OutboundState.SEALED or unanswered or not self.window_bytes
        return self.last_progress_at + self.settings.answer_timeout if waiting else NEVER

    def is_answer_overdue(self, now: float) -> bool:
        """Whether decode has not answered a Write or Seal for `answer_timeout`."""
        return self.state in _OPEN_STATES and now >= self._answer_deadline

    # calls of the node

    def on_gate_passed(self, gate: ReadyGate) -> list[OutboundOutput]:
        """Slabs that were announced behind this gate are final."""
        self.progress = self.progress.with_passed(gate, self.landed_slabs.bit_count())
        return []

    def announce_slabs(self, ready: ReadySlabs, now: float) -> list[OutboundOutput]:
        """Queue slabs whose KV is final, or behind a gate. They are sent with the ticket known."""
        if self.state not in _OPEN_STATES:
            return [IgnoredInput("announce")]
        if not ready.source_blocks:
            return []
        if (
            not self.grid.contains(ready.slab_range)
            or self.grid.bitmask(ready.slab_range) & self.announced_slabs
            or self.pending_seal
        ):
            return self.abort(
                IncompleteTransfer(
                    f"{ready.slab_range} was announced twice, out of range or after seal"
                )
            )
        self.announced_slabs |= self.grid.bitmask(ready.slab_range)
        self.send_queue += self._clip_to_missing(ready)
        landed = self.landed_slabs.bit_count()
        self.progress = self.progress.with_announced(ready.gate, landed, now)
        return []

    def set_ticket(self, ticket: Ticket, lock: WriterLock, now: float) -> list[OutboundOutput]:
        """Accept the ticket: queued slabs may be sent. A device waits for decode's first Credit."""
        if self.state is not OutboundState.UNTICKETED:
            return [IgnoredInput("ticket")]
        if (
            ticket.first_block + len(ticket.block_offsets) != self.num_blocks
            or ticket.writer_incarnation != self.writer_incarnation
        ):
            return self.abort(
                StaleMessage(
                    f"the ticket is for writer {ticket.writer_incarnation} and blocks "
                    f"{ticket.first_block}+{len(ticket.block_offsets)}, this is "
                    f"{self.writer_incarnation} with {self.num_blocks}"
                )
            )
        self.state = OutboundState.STREAMING
        self.ticket, self.lock = ticket, lock
        self.window_bytes = self.settings.initial_window_bytes
        self.send_queue = tuple(
            piece for ready in self.send_queue for piece in self._clip_to_missing(ready)
        )
        self.last_progress_at = now
        self.next_renewal_at = now + self.settings.renew_interval
        open_frame = frames.OpenFrame(
            *self._frame_ids,
            version=frames.PROTOCOL_VERSION,
            num_layers=self.shape.num_layers,
            slab_bytes=self.shape.slab_bytes,
            window_bytes=self.settings.window_bytes,
            host_id=self.host_id,
            writer_process=self.writer_process,
        )
        return [open_frame, *self._seal_if_all_written(now)]

    def seal(self, info: SealInfo, now: float) -> list[OutboundOutput]:
        """Every slab was announced: send Seal once all of them are written."""
        if self.state not in _OPEN_STATES or self.pending_seal is not None:
            return [IgnoredInput("seal")]
        self.pending_seal = info
        return self._seal_if_all_written(now)

    def abort(self, error: BatonError) -> list[OutboundOutput]:
        """Give the hand-off up. It ends in OutboundAborted once no write is in flight."""
        if self.state not in _OPEN_STATES:
            return [IgnoredInput("abort")]
        # The traceback's frames would keep the peer's arena mapped as long as the error is kept.
        self.error = error.with_traceback(None)
        self.send_queue = ()
        self.needs_abort_frame = self.ticket is not None
        self.state = OutboundState.ABORTING
        return self._finish_abort_if_idle()

    # writing

    def begin_write(self, now: float) -> tuple[OutgoingWrite | None, list[OutboundOutput]]:
        """Take slabs to send, if there is credit. `finish_write` or `fail_write` must follow."""
        if self.state is not OutboundState.STREAMING or not (self.send_queue and self.window_bytes):
            return None, []
        slab = self.shape.slab_bytes
        room = min(self.settings.max_payload_bytes, self.window_bytes - self.unacked_bytes)
        if room < slab and self.unacked_bytes:
            return None, []
        if self.writes_in_flight == 0 and not self.lock.try_acquire():
            return None, self.abort(StaleMessage("decode has fenced this ticket off"))
        write, self.send_queue = split_next_write(
            self.send_queue, max(1, room // slab), self.settings.layers_per_message
        )
        size = write.slab_range.num_slabs * slab
        self.sent_slabs |= self.grid.bitmask(write.slab_range)
        self.unacked_bytes += size
        self.bytes_in_flight += size
        self.writes_in_flight += 1
        return write, []

    def finish_write(
        self, write: OutgoingWrite, checksum: int, is_inline: bool, now: float
    ) -> list[OutboundOutput]:
        """The source blocks of `write` were read and will not be read again."""
        slab_range = write.slab_range
        size = slab_range.num_slabs * self.shape.slab_bytes
        self.bytes_in_flight -= size
        self._release_write()
        if self.state is OutboundState.ABORTING:
            return self._finish_abort_if_idle()
        self.bytes_sent += size
        self.manifest_digest = extend_manifest_digest(self.manifest_digest, slab_range, checksum)
        self.last_progress_at = now
        frame = frames.WriteFrame(
            *self._frame_ids,
            first_layer=slab_range.first_layer,
            num_layers=slab_range.num_layers,
            first_block=slab_range.first_block,
            num_blocks=slab_range.num_blocks,
            first_kv_head=0,
            num_kv_heads=self.shape.num_kv_heads,
            payload_bytes=size,
            checksum=checksum,
            is_inline=is_inline,
        )
        return [frame, *self._seal_if_all_written(now)]

    def fail_write(self, error: BatonError) -> list[OutboundOutput]:
        """The slabs of a write could not be read or written. The hand-off aborts."""
        outputs = self.abort(error)
        self._release_write()
        return outputs + self._finish_abort_if_idle()

    # frames from decode

    def on_frame(self, frame: frames.FrameToWriter, now: float) -> list[OutboundOutput]:
        """Handle what decode sent; frames that are stale in the present state change nothing."""
        if not self._is_current_frame(frame):
            return [IgnoredInput("stale")]
        match frame:
            case frames.CreditFrame():
                self.window_bytes = frame.window_bytes
                return []
            case frames.LandedFrame() if self.state in _OPEN_STATES:
                return self._on_landed(frame.slab_range, now)
            case frames.CommittedFrame() if self.state is OutboundState.SEALED:
                return self._on_committed(now)
            case frames.RefusedFrame() if self.state in _OPEN_STATES:
                return self._on_refused(frame)
            case _:
                return [IgnoredInput("stale")]

    def _on_landed(self, slab_range: SlabRange, now: float) -> list[OutboundOutput]:
        if not self.grid.contains(slab_range):
            return self.abort(
                IncompleteTransfer(f"decode acknowledged {slab_range}, which is out of range")
            )
        bits = self.grid.bitmask(slab_range)
        if bits & ~self.sent_slabs:
            return self.abort(
                IncompleteTransfer(f"decode acknowledged {slab_range}, which was not sent")
            )
        if bits & self.landed_slabs:
            return [IgnoredInput("duplicate")]
        self.landed_slabs |= bits
        self.unacked_bytes -= slab_range.num_slabs * self.shape.slab_bytes
        self.last_progress_at = now
        self.progress = replace(self.progress, last_landed_at=now)
        return []

    def _on_committed(self, now: float) -> list[OutboundOutput]:
        self.state = OutboundState.COMMITTED
        assert self.ticket is not None
        stats = HandoffStats(
            transport=self.ticket.transport,
            bytes_sent=self.bytes_sent,
            slabs_sent=self.sent_slabs.bit_count(),
            slabs_landed_before_last_layer=self.progress.landed_before_last_layer,
            exposed_seconds=self.progress.exposed_seconds,
            commit_seconds=self.progress.commit_seconds(now),
        )
        return [OutboundCommitted(self.key, stats)]

    def _on_refused(self, frame: frames.RefusedFrame) -> list[OutboundOutput]:
        self.error = handoff_error_from_peer(frame.code, frame.message)
        self.send_queue = ()
        self.state = OutboundState.ABORTING
        return self._finish_abort_if_idle()

    # link and time

    def on_link_lost(self, error: BatonError, was_up: bool) -> list[OutboundOutput]:
        """The link is lost, and frames with it. Repeat Seal over a new link, or else abort.

        Repeating is safe because Seal is idempotent. A link that was never up is not tried again.
        """
        if self.state is OutboundState.SEALED and was_up:
            return [self._seal_frame()]
        return self.abort(error) if self.ticket is not None else []

    def tick(self, now: float) -> list[OutboundOutput]:
        """Renew the ticket when that is due. Abort when decode has not answered in time."""
        if self.state not in _OPEN_STATES:
            return []
        if self.is_answer_overdue(now):
            return self.abort(
                PeerUnreachable(
                    f"decode did not answer for {self.settings.answer_timeout} s (progress_timeout)"
                )
            )
        if now < self.next_renewal_at:
            return []
        self.next_renewal_at = now + self.settings.renew_interval
        return [frames.RenewFrame(*self._frame_ids)]

    # rules

    def _is_current_frame(self, frame: frames.Frame) -> bool:
        return self.ticket is not None and frame.ids == self._frame_ids

    def _clip_to_missing(self, ready: ReadySlabs) -> tuple[ReadySlabs, ...]:
        """The part of an announcement that decode does not hold yet."""
        return ready.clip_before(self.ticket.first_block) if self.ticket else (ready,)

    def _seal_if_all_written(self, now: float) -> list[OutboundOutput]:
        if (
            self.state is not OutboundState.STREAMING
            or self.pending_seal is None
            or self.send_queue
            or self.writes_in_flight
        ):
            return []
        assert self.ticket is not None
        slabs = (self.num_blocks - self.ticket.first_block) * self.shape.num_layers
        if (sent := self.sent_slabs.bit_count()) != slabs:
            return self.abort(IncompleteTransfer(f"sealed with {sent} of {slabs} slabs announced"))
        self.state = OutboundState.SEALED
        self.last_progress_at = now
        return [self._seal_frame()]

    def _seal_frame(self) -> frames.FrameToDecode:
        assert self.pending_seal is not None
        score = self.pending_seal.last_token_score
        return frames.SealFrame(
            *self._frame_ids,
            num_slabs=self.sent_slabs.bit_count(),
            payload_bytes=self.bytes_sent,
            digest=self.manifest_digest,
            emitted_token_ids=self.pending_seal.emitted_token_ids,
            logprob=score.logprob if score else None,
            top=score.top_logprobs if score else (),
        )

    def _finish_abort_if_idle(self) -> list[OutboundOutput]:
        if self.writes_in_flight or self.state is not OutboundState.ABORTING:
            return []
        self.state = OutboundState.ABORTED
        assert self.error is not None
        aborted = OutboundAborted(self.key, self.error)
        if not self.needs_abort_frame:
            return [aborted]
        code, message = self.error.code, self.error.message[:512]
        return [frames.AbortFrame(*self._frame_ids, code=code, message=message), aborted]

    def _release_write(self) -> None:
        self.writes_in_flight -= 1
        if self.writes_in_flight == 0:
            self.lock.release()

    @property
    def _frame_ids(self) -> tuple[str, int, str, str]:
        assert self.ticket is not None
        return (
            self.ticket.id,
            self.key.attempt_number,
            self.writer_incarnation,
            self.ticket.decode_peer.incarnation,
        )
