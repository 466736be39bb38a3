"""A small world around the two machines: writers, decode's block pool, fence bytes, an ordered network, crashes. Every
moment at which something else could happen in the real system is an action of its own, so a search over actions is a
search over interleavings. What must never be is checked at the moment it would happen: `Violation`.

Contents are modelled by tags: (writer, layer, block) in a slab means that this writer's KV of that logical slab lies
there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from baton.errors import Cancelled, PeerGone
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
)
from kv_transfer.core import departure, events, frames, landing
from kv_transfer.core.departure import Departure, DepartureState, Pace
from kv_transfer.core.landing import ArenaShape, Ignored, Landing, LandingState
from kv_transfer.core.ready import Announced, Outgoing
from kv_transfer.core.slabs import Rectangle

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


Key = tuple[Any, ...]


_numbers: dict[Any, int] = {}


def _number(value: Any) -> int:
    """A small number for a value, equal for equal values: states are compared by these."""
    return _numbers.setdefault(value, len(_numbers))


_SKIP = {"ticket", "shape", "fence", "lock", "grid", "error", "pace", "key", "writer", "host", "credit"}
_landing_key = attrgetter(*(f.name for f in fields(Landing) if f.name not in _SKIP))
_departure_key = attrgetter(*(f.name for f in fields(Departure) if f.name not in _SKIP))
_ALL_LANDING = tuple(f.name for f in fields(Landing))
_ALL_DEPARTURE = tuple(f.name for f in fields(Departure))


def _clone(machine: Any, names: tuple[str, ...]) -> Any:
    copy = object.__new__(type(machine))
    for name in names:
        setattr(copy, name, getattr(machine, name))
    return copy


@dataclass(slots=True)
class World:
    setting: Setting
    departures: dict[int, Departure] = field(default_factory=dict)  # by writer; shared between worlds: see `_departure`
    landings: dict[int, Landing] = field(default_factory=dict)  # by attempt; shared likewise
    numbers: dict[str, int] = field(default_factory=dict)  # of each machine's state
    announced: dict[int, int] = field(default_factory=dict)  # (chunk, layer) steps done by each writer
    up: dict[int, tuple[Sent, ...]] = field(default_factory=dict)
    down: dict[int, tuple[frames.Frame, ...]] = field(default_factory=dict)
    reading: dict[int, Outgoing | None] = field(default_factory=dict)
    locks: frozenset[tuple[int, str]] = frozenset()  # (fence byte, holder)
    arena: tuple[Tag, ...] = ()
    times_landed: tuple[int, ...] = ()
    owner: int | None = None  # attempt that holds the blocks
    in_use: bool = False  # ... since its commit
    late: frozenset[int] = frozenset()  # tickets whose lease has passed
    dead: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()  # departures and landings that told their end
    faults: int = 0
    endings: int = 0
    cut: frozenset[int] = frozenset()  # writers that have yet to notice that their link was lost

    @classmethod
    def start(cls, setting: Setting) -> "World":
        slabs = setting.layers * setting.blocks
        world = cls(setting, arena=(EMPTY,) * slabs, times_landed=(0,) * slabs)
        world._open(0)
        if setting.ghost:
            world._open(_GHOST)
        world._grant(0)
        return world

    # identity

    def key(self) -> Key:
        return (
            *self.numbers.values(),
            *self.announced.values(),
            *map(_number, self.up.values()),
            *map(_number, self.down.values()),
            *self.reading.values(),
            self.locks,
            _number(self.arena),
            _number(self.times_landed),
            self.owner,
            self.in_use,
            self.late,
            self.dead,
            self.ended,
            self.faults,
            self.endings,
            self.cut,
        )

    def clone(self) -> "World":
        return World(
            self.setting,
            dict(self.departures),
            dict(self.landings),
            dict(self.numbers),
            dict(self.announced),
            dict(self.up),
            dict(self.down),
            dict(self.reading),
            self.locks,
            self.arena,
            self.times_landed,
            self.owner,
            self.in_use,
            self.late,
            self.dead,
            self.ended,
            self.faults,
            self.endings,
            self.cut,
        )

    def _departure(self, writer: int) -> Departure:
        """The machine, to be changed: a copy of this world's own."""
        machine: Departure = _clone(self.departures[writer], _ALL_DEPARTURE)
        self.departures[writer] = machine
        if isinstance(machine.lock, _Lock):
            machine.lock = _Lock(self, writer)
        return machine

    def _landing(self, attempt: int) -> Landing:
        machine: Landing = _clone(self.landings[attempt], _ALL_LANDING)
        self.landings[attempt] = machine
        machine.fence = self._fence(attempt)
        return machine

    # what can happen next

    def actions(self) -> list[tuple[str, int]]:
        """What goes on by itself; the faults; as often as `endings` says, a change of mind or the end of a lease; and,
        when nothing of all that is left, the time-outs. So whatever ends only by a time-out does end by it."""
        found = [*self._progress(), *self._faults()]
        if self.endings < self.setting.endings:
            found += [*self._changes_of_mind(), *self._leases()]
        return found or [*self._leases(), *self._patience()]

    def act(self, name: str, who: int) -> None:
        getattr(self, f"do_{name}")(who)

    def _progress(self) -> Iterator[tuple[str, int]]:
        yield from self._writers_progress()
        if "decode" not in self.dead:
            yield from self._decodes_progress()

    def _writers_progress(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.departures.items():
            if self._gone(writer):
                continue
            state = machine.state
            if self.reading[writer] is not None:
                yield "finish_write", writer
            if self.down[writer]:
                yield "deliver_to_writer", writer
            if writer in self.cut:
                yield "notice_cut", writer
            if state in departure.ENDED or state is DepartureState.ABORTING:
                continue
            if self.announced[writer] < len(self._steps()):
                yield "announce", writer
            if state is DepartureState.SPECULATIVE and self._attempt(writer) in self.landings:
                yield "ticket", writer
            if state is DepartureState.STREAMING and machine.queue and self.reading[writer] is None:
                yield "begin_write", writer
        if self.setting.attempts > 1 and 1 not in self.departures and self._first_attempt_failed():
            yield "place_again", 1

    def _decodes_progress(self) -> Iterator[tuple[str, int]]:
        if 1 in self.departures and 1 not in self.landings and self.owner is None:
            yield "grant", 1
        for writer in self.departures:
            if self.up[writer]:
                yield "deliver_to_decode", writer
        for attempt, machine in self.landings.items():
            if attempt in self.late and machine.deadline <= LATE:
                yield "tick", attempt
            if machine.state in landing.AWAITING_FENCE:
                yield "retry_fence", attempt
            if machine.state is LandingState.SEALED:
                yield "commit", attempt

    def _changes_of_mind(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.departures.items():
            over = machine.state in departure.ENDED or machine.state is DepartureState.ABORTING
            if not over and not self._gone(writer):
                yield "abort", writer
        for attempt, landing_machine in self.landings.items():
            if landing_machine.state in landing.LIVE and "decode" not in self.dead:
                yield "revoke", attempt

    def _leases(self) -> Iterator[tuple[str, int]]:
        for attempt, machine in self.landings.items():
            if machine.deadline < LATE and attempt not in self.late and "decode" not in self.dead:
                yield "lease_passes", attempt

    def _patience(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.departures.items():
            if machine.unanswered(LATE) and not self._gone(writer):
                yield "give_up_waiting", writer
            elif machine.state is DepartureState.SPECULATIVE and not self._gone(writer):
                yield "abort", writer  # its role gives it up: there is no clock for work without a ticket

    def _faults(self) -> Iterator[tuple[str, int]]:
        if self.faults >= self.setting.faults:
            return
        kinds = self.setting.fault_kinds
        for writer, machine in self.departures.items():
            if self._gone(writer):
                continue
            ended = machine.state in departure.ENDED
            if "crash" in kinds and not ended:
                yield "crash_writer", writer
            if "cut" in kinds and not ended and machine.ticket is not None and "decode" not in self.dead:
                yield "cut_link", writer
            if self.up[writer] and "decode" not in self.dead:
                if "duplicate" in kinds:
                    yield "duplicate", writer
                if "drop" in kinds:
                    yield "drop", writer
            if "corrupt" in kinds and self.reading[writer] is not None:
                yield "corrupt", writer
        if "crash" in kinds and "decode" not in self.dead:
            yield "crash_decode", 0

    def check_quiescent(self) -> None:
        """No action is left: everything must have ended, once, and nothing may be held."""
        for writer in self.departures:
            if not self._gone(writer) and f"departure {writer}" not in self.ended:
                raise Violation(f"writer {writer} never ended")
        if "decode" in self.dead:
            return
        for attempt in self.landings:
            if f"landing {attempt}" not in self.ended:
                raise Violation(f"ticket {attempt} never ended")
        if self.owner is not None and not self.in_use:
            raise Violation(f"blocks are still held by ticket {self.owner}")

    # writers

    def do_announce(self, writer: int) -> None:
        layer, first, count = self._steps()[self.announced[writer]]
        self.announced[writer] += 1
        source = tuple(BlockIndex(10 * (writer + 2) + first + n) for n in range(count))
        machine = self._departure(writer)
        self._from_writer(writer, machine.announce(Announced(layer, first, source), 0.0))
        if self.announced[writer] == len(self._steps()):
            self._from_writer(writer, machine.seal(events.SealInfo((writer + 1,)), 0.0))

    def do_ticket(self, writer: int) -> None:
        ticket = self.landings[self._attempt(writer)].ticket
        if writer == _GHOST:
            ticket = replace(ticket, writer=self.departures[writer].writer)
        lock = _Lock(self, writer) if self.setting.one_sided else departure.NoLock()
        self._from_writer(writer, self._departure(writer).grant(ticket, lock, 0.0))

    def do_begin_write(self, writer: int) -> None:
        outgoing, outputs = self._departure(writer).next_write()
        self._from_writer(writer, outputs)
        self.reading[writer] = outgoing

    def do_finish_write(self, writer: int, damage: bool = False) -> None:
        """The bytes are read and, one-sided, written: all of it between begin and here."""
        outgoing = self.reading[writer]
        assert outgoing is not None
        self.reading[writer] = None
        if f"departure {writer}" in self.ended:
            raise Violation("source blocks were released under a read")
        content = self._content(writer, outgoing.area)
        arrives = (TORN,) * len(content) if damage else content
        if self.setting.one_sided:
            self._put(writer, outgoing.area, arrives)
        outputs = self._departure(writer).written(outgoing, _checksum(content), not self.setting.one_sided, 0.0)
        self._from_writer(writer, outputs, None if self.setting.one_sided else arrives)

    def do_abort(self, writer: int) -> None:
        self.endings += 1
        self._from_writer(writer, self._departure(writer).abort(Cancelled("role")))

    def do_give_up_waiting(self, writer: int) -> None:
        self.endings += 1
        self._from_writer(writer, self._departure(writer).tick(LATE), renewals=False)

    def do_deliver_to_writer(self, writer: int) -> None:
        frame, *rest = self.down[writer]
        self.down[writer] = tuple(rest)
        self._hear(writer, frame)

    def _hear(self, writer: int, frame: frames.Frame) -> None:
        machine = self._departure(writer)
        match frame:
            case frames.Credit():
                outputs = machine.credit(frame)
            case frames.Landed():
                outputs = machine.landed(frame, 0.0)
            case frames.Committed():
                outputs = machine.committed(frame, 0.0)
            case frames.Refused():
                outputs = machine.refused(frame)
        self._from_writer(writer, outputs)

    def do_notice_cut(self, writer: int) -> None:
        self.cut -= {writer}
        was_up = "decode" not in self.dead
        self._from_writer(writer, self._departure(writer).link_lost(PeerGone("link"), was_up))

    def do_place_again(self, writer: int) -> None:
        self._open(writer)

    # decode

    def do_grant(self, attempt: int) -> None:
        self._grant(attempt)

    def do_deliver_to_decode(self, writer: int) -> None:
        sent, *rest = self.up[writer]
        self.up[writer] = tuple(rest)
        self._to_decode(writer, sent)

    def do_lease_passes(self, attempt: int) -> None:
        self.endings += 1
        self.late |= {attempt}

    def do_tick(self, attempt: int) -> None:
        self._from_decode(attempt, self._landing(attempt).tick(LATE))

    def do_retry_fence(self, attempt: int) -> None:
        self._from_decode(attempt, self._landing(attempt).tick(0.0))

    def do_commit(self, attempt: int) -> None:
        if self.owner != attempt:
            raise Violation(f"ticket {attempt} commits blocks of {self.owner}")
        self._check_contents(attempt)
        self.in_use = True
        self.ended |= {f"landing {attempt}"}
        self._from_decode(attempt, self._landing(attempt).commit())

    def do_revoke(self, attempt: int) -> None:
        self.endings += 1
        self._from_decode(attempt, self._landing(attempt).revoke(Cancelled("role")))

    # faults

    def do_crash_writer(self, writer: int) -> None:
        """Whatever it was writing is torn, and the kernel drops its locks. What it sent may still arrive."""
        self.faults += 1
        if (outgoing := self.reading[writer]) is not None and self.setting.one_sided:
            self._put(writer, outgoing.area, (TORN,) * outgoing.area.slabs)
        self.reading[writer] = None
        self.dead |= {f"writer {writer}"}
        self.locks = frozenset(lock for lock in self.locks if lock[1] != f"writer {writer}")
        self.down[writer] = ()
        self.numbers[f"departure {writer}"], self.announced[writer] = -1, 0

    def do_crash_decode(self, _: int) -> None:
        """Its arena is nobody's any more; the writers' links are lost."""
        self.faults += 1
        self.dead |= {"decode"}
        self.arena, self.times_landed = (EMPTY,) * len(self.arena), (0,) * len(self.times_landed)
        self.owner, self.late = None, frozenset()
        self.locks = frozenset(lock for lock in self.locks if lock[1] != "decode")
        for attempt in self.landings:
            self.numbers[f"landing {attempt}"] = -1
        for writer, machine in self.departures.items():
            self.up[writer] = self.down[writer] = ()
            if machine.ticket is not None and machine.state not in departure.ENDED:
                self.cut |= {writer}

    def do_cut_link(self, writer: int) -> None:
        """What is still under way is lost, either way."""
        self.faults += 1
        self.up[writer] = self.down[writer] = ()
        self.cut |= {writer}

    def do_duplicate(self, writer: int) -> None:
        self.faults += 1
        self._to_decode(writer, self.up[writer][0])

    def do_drop(self, writer: int) -> None:
        self.faults += 1
        self.up[writer] = self.up[writer][1:]

    def do_corrupt(self, writer: int) -> None:
        """What lands is not what was read."""
        self.faults += 1
        self.do_finish_write(writer, damage=True)

    # plumbing

    def _open(self, writer: int) -> None:
        setting = self.setting
        attempt = self._attempt(writer)
        self.departures[writer] = setting.departure(
            key=AttemptKey(RequestId("r"), attempt, 0),
            writer=Incarnation(f"writer {writer}"),
            shape=ArenaShape(setting.layers, 1, SLAB),
            blocks=setting.held + setting.blocks,
            pace=setting.pace,
        )
        self.numbers[f"departure {writer}"] = -1
        self.announced[writer] = 0
        self.up[writer], self.down[writer], self.reading[writer] = (), (), None
        if attempt > 0:  # a search that also spread out the second attempt's layers would learn nothing new
            for _ in self._steps():
                self.do_announce(writer)

    def _grant(self, attempt: int) -> None:
        setting = self.setting
        if self.owner is not None:
            raise Violation("blocks were granted twice")
        self.owner = attempt
        ticket = Ticket(
            id=TicketId(f"{attempt:032x}"),
            key=AttemptKey(RequestId("r"), attempt, 0),
            decode=PeerAddress(NodeName("d"), DECODE, "h", "e"),
            writer=Incarnation(f"writer {attempt}"),
            first_block=setting.held,
            offsets=tuple(range(setting.blocks)),
            num_tokens=setting.held + setting.blocks,
            ttl=1.0,
            transport="shm" if setting.one_sided else "zmq",
            segment=SegmentRef("s", DECODE),
            fence=attempt,
        )
        shape = ArenaShape(setting.layers, 1, SLAB)
        self.numbers[f"landing {attempt}"] = -1
        self.landings[attempt] = setting.landing(ticket, shape, self._fence(attempt), 1 << 20, 1.0, 1.0)

    def _fence(self, attempt: int) -> Callable[[], bool]:
        if not self.setting.one_sided:
            return lambda: True
        return lambda: self._take(attempt, "decode")

    def _take(self, byte: int, holder: str) -> bool:
        if any(held == byte and who != holder for held, who in self.locks):
            return False
        self.locks |= {(byte, holder)}
        return True

    def _steps(self) -> list[tuple[int, int, int]]:
        """(layer, first block, blocks) in the order in which a forward pass makes them final."""
        setting = self.setting
        total = setting.held + setting.blocks
        chunks, first = [], 0
        for size in setting.chunks or (total,):
            chunks.append((first, size))
            first += size
        return [(layer, first, size) for first, size in chunks for layer in range(setting.layers)]

    def _attempt(self, writer: int) -> int:
        return 0 if writer == _GHOST else writer

    def _ticket_is_over(self, writer: int) -> bool:
        machine = self.landings.get(self._attempt(writer))
        return machine is not None and machine.state in landing.ENDED

    def _gone(self, writer: int) -> bool:
        return f"writer {writer}" in self.dead

    def _first_attempt_failed(self) -> bool:
        if "decode" in self.dead:
            return False
        lost = self.landings[0].state in (LandingState.LOST, LandingState.QUARANTINED)
        return lost or self.departures[0].state is DepartureState.ABORTED or self._gone(0)

    def _content(self, writer: int, area: Rectangle) -> tuple[Tag, ...]:
        return tuple(
            (writer, layer, block)
            for layer in range(area.layer, area.last_layer)
            for block in range(area.block, area.last_block)
        )

    def _places(self, area: Rectangle) -> list[int]:
        setting = self.setting
        return [
            layer * setting.blocks + block - setting.held
            for layer in range(area.layer, area.last_layer)
            for block in range(area.block, area.last_block)
        ]

    def _put(self, writer: int, area: Rectangle, content: tuple[Tag, ...]) -> None:
        """Bytes reach the arena. They may only reach blocks that are this writer's to write."""
        if "decode" in self.dead:
            return
        if self.owner != self._attempt(writer) or self.in_use:
            raise Violation(f"writer {writer} wrote blocks of {self.owner} (in use: {self.in_use})")
        arena = list(self.arena)
        for place, tag in zip(self._places(area), content, strict=True):
            arena[place] = tag
        self.arena = tuple(arena)

    def _to_decode(self, writer: int, sent: Sent) -> None:
        frame = sent.frame
        attempt = int(frame.ticket, 16)
        machine = self._landing(attempt)
        now = LATE if attempt in self.late else 0.0
        match frame:
            case frames.Open():
                outputs = machine.open(frame, now)
            case frames.Write():
                outputs = self._land(machine, frame, sent, now)
            case frames.Seal():
                outputs = machine.seal(frame, now)
            case frames.Abort():
                outputs = machine.abort(frame)
            case frames.Renew():
                outputs = machine.renew(frame, now)
        self._from_decode(attempt, outputs, reply_to=writer)

    def _land(self, machine: Landing, frame: frames.Write, sent: Sent, now: float) -> list[landing.Output]:
        admitted, outputs = machine.admit(frame, now)
        if not admitted:
            return outputs
        if now == LATE:
            raise Violation("a slab landed under an expired ticket")
        content = sent.content
        if content is None:
            content = tuple(self.arena[place] for place in self._places(frame.area))
        right = _checksum(content) == frame.checksum
        if right and sent.content is not None:
            self._put(int(machine.ticket.id, 16), frame.area, content)
        if right:
            times = list(self.times_landed)
            for place in self._places(frame.area):
                times[place] += 1
                if times[place] > 1:
                    raise Violation("a slab was counted twice")
            self.times_landed = tuple(times)
        return machine.landed(frame, right, now)

    def _check_contents(self, attempt: int) -> None:
        setting = self.setting
        wanted = self._content(attempt, Rectangle(0, setting.layers, setting.held, setting.blocks))
        if self.arena != wanted:
            raise Violation(f"ticket {attempt} is sealed over {self.arena}")

    def _from_writer(
        self,
        writer: int,
        outputs: list[departure.Output],
        content: tuple[Tag, ...] | None = None,
        renewals: bool = True,
    ) -> None:
        machine = self.departures[writer]
        over = machine.state in departure.ENDED
        self.numbers[f"departure {writer}"] = _number(machine.state if over else _departure_key(machine))
        for output in outputs:
            match output:
                case events.Committed() | events.Aborted():
                    self._end(f"departure {writer}")
                    if self.reading[writer] is not None:
                        raise Violation("the end was told under a read")
                    if any(who == f"writer {writer}" for _, who in self.locks):
                        raise Violation("the end was told under a lock")
                case frames.Frame():
                    if isinstance(output, frames.Seal) and any(w == f"writer {writer}" for _, w in self.locks):
                        raise Violation("sealed under a lock")
                    renewal = isinstance(output, frames.Renew)
                    if "decode" not in self.dead and writer not in self.cut and not (renewal and not renewals):
                        sent = Sent(output, content if isinstance(output, frames.Write) else None)
                        if self._ticket_is_over(writer) and not self.up[writer]:
                            self._to_decode(writer, sent)  # when it arrives makes no difference any more
                        else:
                            self.up[writer] += (sent,)
                case Ignored() | events.LayerLanded():
                    pass
        if over:
            self.announced[writer] = len(self._steps())
            self.down[writer] = ()

    def _from_decode(self, attempt: int, outputs: list[landing.Output], reply_to: int | None = None) -> None:
        machine = self.landings[attempt]
        over = machine.state in landing.ENDED
        self.numbers[f"landing {attempt}"] = _number(machine.state if over else _landing_key(machine))
        for output in outputs:
            match output:
                case events.Sealed():
                    if self.setting.one_sided and (attempt, "decode") not in self.locks:
                        raise Violation("sealed without the fence")
                    self._check_contents(attempt)
                case events.Lost():
                    self._release(attempt, output.fenced)
                case events.Fenced():
                    self._release(attempt, True)
                case frames.Frame():
                    to = attempt if reply_to is None else reply_to
                    if self._gone(to) or to in self.cut or self.departures[to].state in departure.ENDED:
                        continue
                    if isinstance(output, frames.Refused) and output in self.down[to]:
                        continue
                    if isinstance(output, frames.Landed | frames.Credit) and not self.setting.slow_acks:
                        self._hear(to, output)
                    else:
                        self.down[to] += (output,)
                case Ignored() | events.Started():
                    pass
        if over:
            self.late -= {attempt}

    def _release(self, attempt: int, fenced: bool) -> None:
        if self.owner != attempt or self.in_use:
            raise Violation(f"ticket {attempt} gave back blocks of {self.owner}")
        if fenced:
            self._end(f"landing {attempt}")
            self.owner = None
            self.arena = (EMPTY,) * len(self.arena)
            self.times_landed = (0,) * len(self.times_landed)

    def _end(self, what: str) -> None:
        if what in self.ended:
            raise Violation(f"{what} ended twice")
        self.ended |= {what}


_GHOST = 9


class _Lock:
    """A writer's byte of the fence file."""

    def __init__(self, world: World, writer: int) -> None:
        self._world = world
        self._writer = writer

    def take(self) -> bool:
        return self._world._take(self._world._attempt(self._writer), f"writer {self._writer}")

    def drop(self) -> None:
        world = self._world
        world.locks -= {(world._attempt(self._writer), f"writer {self._writer}")}


def _checksum(content: tuple[Tag, ...]) -> int:
    return hash(content) & (2**63 - 1)
