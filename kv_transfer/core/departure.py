"""Prefill's side of one hand-off, as a pure machine.

    SPECULATIVE --ticket--> STREAMING --all written, seal--> SEALED --Committed--> COMMITTED
         |                      |                               |
         +----------------------+-------- abort, Refused -------+--> ABORTING --last write done--> ABORTED

Before its ticket is known a hand-off is speculative: announced slabs queue up. `next_write` takes what is ready,
`written` says that the source was read and, one-sided, that the bytes are in place. While a write is in flight the
hand-off does not end: ABORTING waits for it, so that source blocks are never released under a reader.

`lock` keeps decode from taking the blocks back under a one-sided writer (baton/fence.py). It is held exactly while
writes are in flight, so never at Seal or at the end; once decode has closed the ticket off it cannot be had again.
Methods return frames for decode, events for the node, and Ignored. COMMITTED and ABORTED are absorbing.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.errors import BatonError, Incomplete, PeerGone, Stale, from_peer
from baton.types import AttemptKey, Incarnation, Ticket
from kv_transfer.core import frames
from kv_transfer.core.events import Aborted, Committed, LayerLanded, OutboundEvent, OutboundReport, SealInfo
from kv_transfer.core.landing import NEVER, ArenaShape, Ignored
from kv_transfer.core.ready import Announced, Outgoing, take
from kv_transfer.core.slabs import Grid, Rectangle, each_layer, manifest_digest


class DepartureState(Enum):
    SPECULATIVE = "speculative"
    STREAMING = "streaming"
    SEALED = "sealed"
    ABORTING = "aborting"
    COMMITTED = "committed"
    ABORTED = "aborted"


ENDED = frozenset({DepartureState.COMMITTED, DepartureState.ABORTED})
_OPEN = frozenset({DepartureState.SPECULATIVE, DepartureState.STREAMING, DepartureState.SEALED})

Output = frames.ToDecode | OutboundEvent | Ignored


class WriterLock(Protocol):
    """The right to write one ticket's blocks. Two-sided backends need none: see `NoLock`."""

    def take(self) -> bool: ...
    def drop(self) -> None: ...


class NoLock:
    def take(self) -> bool:
        return True

    def drop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Pace:
    """How a hand-off is cut into messages and how long it waits. Bytes and seconds; `layers_per_message` 0
    puts as many layers into a message as are ready and fit."""

    max_payload: int
    layers_per_message: int
    window: int
    renew_interval: float
    answer_timeout: float


@dataclass(slots=True)
class Departure:
    key: AttemptKey
    writer: Incarnation
    shape: ArenaShape
    blocks: int  # logical blocks of the whole context
    pace: Pace
    host: str = ""
    state: DepartureState = DepartureState.SPECULATIVE
    ticket: Ticket | None = None
    lock: WriterLock = field(default_factory=NoLock)
    writes: int = 0  # in flight
    queue: tuple[Announced, ...] = ()
    announced: int = 0  # sets of slabs of `grid`
    sent: int = 0
    arrived: int = 0
    outstanding: int = 0  # bytes taken for writing and not yet landed
    window: int = frames.INITIAL_WINDOW
    bytes_sent: int = 0
    digest: int = 0
    pending_seal: SealInfo | None = None
    error: BatonError | None = None
    tell: bool = False  # decode, with Abort, once no write is in flight
    heard: float = 0.0  # when decode last moved us on, or we last gave it something to answer
    next_renewal: float = NEVER
    last_ready: float = 0.0
    last_landed: float = 0.0
    arrived_before_last_layer: int = 0
    grid: Grid = field(init=False)

    def __post_init__(self) -> None:
        self.grid = Grid(self.shape.num_layers, 0, self.blocks)

    @property
    def deadline(self) -> float:
        return min(self.next_renewal, self._answer_deadline) if self.state in _OPEN else NEVER

    @property
    def _answer_deadline(self) -> float:
        waiting = self.state is DepartureState.SEALED or self.outstanding > 0
        return self.heard + self.pace.answer_timeout if waiting else NEVER

    def unanswered(self, now: float) -> bool:
        """Whether decode owes an answer for longer than it may."""
        return self.state in _OPEN and now >= self._answer_deadline

    def layer_has_landed(self, layer: int) -> bool:
        """Whether every slab of the layer announced so far, less what decode held already, has landed."""
        first = self.ticket.first_block if self.ticket else 0
        if first >= self.blocks:
            return True
        wanted = self.grid.bits(Rectangle(layer, 1, first, self.blocks - first)) & self.announced
        return self.ticket is not None and wanted & ~self.arrived == 0

    # the node's own calls

    def announce(self, ready: Announced, now: float) -> list[Output]:
        if self.state not in _OPEN:
            return [Ignored("announce")]
        if not ready.source:
            return []
        if not self.grid.holds(ready.area) or self.grid.bits(ready.area) & self.announced or self.pending_seal:
            return self.abort(Incomplete(f"{ready.area} was announced twice, out of range or after seal"))
        self.announced |= self.grid.bits(ready.area)
        self.last_ready = now
        self.arrived_before_last_layer = self.arrived.bit_count()
        self.queue += self._wanted(ready)
        return []

    def grant(self, ticket: Ticket, lock: WriterLock, now: float) -> list[Output]:
        """The destination is known."""
        if self.state is not DepartureState.SPECULATIVE:
            return [Ignored("ticket")]
        if ticket.first_block + len(ticket.offsets) != self.blocks or ticket.writer != self.writer:
            return self.abort(
                Stale(
                    f"the ticket is for writer {ticket.writer} and blocks {ticket.first_block}+"
                    f"{len(ticket.offsets)}, this is {self.writer} with {self.blocks}"
                )
            )
        self.state = DepartureState.STREAMING
        self.ticket, self.lock = ticket, lock
        self.queue = tuple(piece for ready in self.queue for piece in self._wanted(ready))
        self.heard = now
        self.next_renewal = now + self.pace.renew_interval
        opened = frames.Open(
            *self._ids,
            version=frames.PROTOCOL_VERSION,
            num_layers=self.shape.num_layers,
            slab_bytes=self.shape.slab_bytes,
            window=self.pace.window,
            host=self.host,
        )
        return [opened, *self._seal_if_done(now)]

    def seal(self, info: SealInfo, now: float) -> list[Output]:
        if self.state not in _OPEN or self.pending_seal is not None:
            return [Ignored("seal")]
        self.pending_seal = info
        return self._seal_if_done(now)

    def abort(self, error: BatonError) -> list[Output]:
        if self.state not in _OPEN:
            return [Ignored("abort")]
        self.error = error.with_traceback(None)  # whose frames would hold the peer's arena for as long as this is kept
        self.queue = ()
        self.tell = self.ticket is not None
        self.state = DepartureState.ABORTING
        return self._end_if_idle()

    # writing

    def next_write(self) -> tuple[Outgoing | None, list[Output]]:
        """Take the next slabs to be read and sent, if any are ready and there is credit. `written` must
        follow."""
        if self.state is not DepartureState.STREAMING or not self.queue:
            return None, []
        slab = self.shape.slab_bytes
        room = min(self.pace.max_payload, self.window - self.outstanding)
        if room < slab and self.outstanding:
            return None, []
        if self.writes == 0 and not self.lock.take():
            return None, self.abort(Stale("decode has closed the ticket off"))
        outgoing, self.queue = take(self.queue, max(1, room // slab), self.pace.layers_per_message)
        self.sent |= self.grid.bits(outgoing.area)
        self.outstanding += outgoing.area.slabs * slab
        self.writes += 1
        return outgoing, []

    def written(self, outgoing: Outgoing, checksum: int, inline: bool, now: float) -> list[Output]:
        """The source of `outgoing` was read and will not be read again."""
        self._write_ended()
        if self.state is DepartureState.ABORTING:
            return self._end_if_idle()
        area = outgoing.area
        size = area.slabs * self.shape.slab_bytes
        self.bytes_sent += size
        self.digest = manifest_digest(self.digest, area, checksum)
        self.heard = now
        write = frames.Write(
            *self._ids,
            layer=area.layer,
            layers=area.layers,
            block=area.block,
            blocks=area.blocks,
            head=0,
            heads=self.shape.num_heads,
            size=size,
            checksum=checksum,
            inline=inline,
        )
        return [write, *self._seal_if_done(now)]

    def write_failed(self, error: BatonError) -> list[Output]:
        """An Outgoing could not be read or written; it will not be tried again."""
        outputs = self.abort(error)
        self._write_ended()
        return outputs + self._end_if_idle()

    # frames from decode

    def credit(self, frame: frames.Credit) -> list[Output]:
        if not self._is_ours(frame):
            return [Ignored("stale")]
        self.window = frame.window
        return []

    def landed(self, frame: frames.Landed, now: float) -> list[Output]:
        if not self._is_ours(frame) or self.state not in _OPEN:
            return [Ignored("stale")]
        area = frame.area
        if not self.grid.holds(area):
            return self.abort(Incomplete(f"decode acknowledged {area}, which is out of range"))
        bits = self.grid.bits(area)
        if bits & ~self.sent:
            return self.abort(Incomplete(f"decode acknowledged {area}, which was not sent"))
        if bits & self.arrived:
            return [Ignored("duplicate")]
        self.arrived |= bits
        self.outstanding -= area.slabs * self.shape.slab_bytes
        self.heard = self.last_landed = now
        return [LayerLanded(self.key, one.layer, one.block, one.last_block) for one in each_layer(area)]

    def committed(self, frame: frames.Committed, now: float) -> list[Output]:
        if not self._is_ours(frame) or self.state is not DepartureState.SEALED:
            return [Ignored("stale")]
        self.state = DepartureState.COMMITTED
        assert self.ticket is not None
        report = OutboundReport(
            transport=self.ticket.transport,
            bytes_sent=self.bytes_sent,
            slabs_sent=self.sent.bit_count(),
            slabs_landed_before_last_layer=self.arrived_before_last_layer,
            exposed_seconds=max(0.0, self.last_landed - self.last_ready),
            commit_seconds=max(0.0, now - max(self.last_landed, self.last_ready)),
        )
        return [Committed(self.key, report)]

    def refused(self, frame: frames.Refused) -> list[Output]:
        if not self._is_ours(frame) or self.state not in _OPEN:
            return [Ignored("stale")]
        self.error = from_peer(frame.code, frame.message)
        self.queue = ()
        self.state = DepartureState.ABORTING
        return self._end_if_idle()

    # link and time

    def link_lost(self, error: BatonError, was_up: bool) -> list[Output]:
        """Frames may be lost. What was sealed over a link that had been up asks again over a new one, which
        is safe because Seal is idempotent; anything else gives up."""
        if self.state is DepartureState.SEALED and was_up:
            return [self._seal_frame()]
        return self.abort(error) if self.ticket is not None else []

    def tick(self, now: float) -> list[Output]:
        if self.state not in _OPEN:
            return []
        if self.unanswered(now):
            return self.abort(PeerGone(f"decode did not answer for {self.pace.answer_timeout} s (progress_timeout)"))
        if now < self.next_renewal:
            return []
        self.next_renewal = now + self.pace.renew_interval
        return [frames.Renew(*self._ids)]

    # the rules

    def _is_ours(self, frame: frames.Frame) -> bool:
        return self.ticket is not None and (frame.ticket, frame.writer, frame.decode, frame.attempt) == (
            self.ticket.id,
            self.writer,
            self.ticket.decode.incarnation,
            self.key.attempt,
        )

    def _wanted(self, ready: Announced) -> tuple[Announced, ...]:
        """The part of an announcement that decode does not hold already."""
        return ready.beyond(self.ticket.first_block) if self.ticket else (ready,)

    def _seal_if_done(self, now: float) -> list[Output]:
        if self.state is not DepartureState.STREAMING or self.pending_seal is None or self.queue or self.writes:
            return []
        assert self.ticket is not None
        wanted = self.blocks - self.ticket.first_block
        if self.sent.bit_count() != wanted * self.shape.num_layers:
            return self.abort(
                Incomplete(f"sealed with {self.sent.bit_count()} of {wanted * self.shape.num_layers} slabs announced")
            )
        self.state = DepartureState.SEALED
        self.heard = now
        return [self._seal_frame()]

    def _seal_frame(self) -> frames.ToDecode:
        assert self.pending_seal is not None
        score = self.pending_seal.score
        return frames.Seal(
            *self._ids,
            slabs=self.sent.bit_count(),
            size=self.bytes_sent,
            digest=self.digest,
            emitted=self.pending_seal.emitted,
            logprob=score.logprob if score else None,
            top=score.top if score else (),
        )

    def _end_if_idle(self) -> list[Output]:
        if self.writes or self.state is not DepartureState.ABORTING:
            return []
        self.state = DepartureState.ABORTED
        assert self.error is not None
        ended: list[Output] = [Aborted(self.key, self.error)]
        if self.tell:
            ended.insert(0, frames.Abort(*self._ids, code=self.error.code, message=self.error.message[:512]))
        return ended

    def _write_ended(self) -> None:
        self.writes -= 1
        if self.writes == 0:
            self.lock.drop()

    @property
    def _ids(self) -> tuple[str, int, str, str]:
        assert self.ticket is not None
        return self.ticket.id, self.key.attempt, self.writer, self.ticket.decode.incarnation
