"""A small world around the two machines: writers, decode's block pool, fence bytes, an ordered network, crashes. Every
moment at which something else could happen in the real system is an action of its own, so a search over actions is a
search over interleavings. What must never be is checked at the moment it would happen: `Violation`.

Contents are modelled by tags: (writer, layer, block) in a slab means that this writer's KV of that logical slab lies
there.
"""

from dataclasses import replace
from typing import Self

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
from kv_transfer.core.landing import ArenaShape, Ignored, Landing
from kv_transfer.core.ready import Announced
from tests.unit.transfer.possible import Possible
from tests.unit.transfer.setting import DECODE, EMPTY, GHOST, LATE, SLAB, TORN, Sent, Setting, Tag, Violation
from tests.unit.transfer.state import Lock, checksum, departure_key, landing_key, number


class World(Possible):
    __slots__ = ()

    @classmethod
    def start(cls, setting: Setting) -> Self:
        slabs = setting.layers * setting.blocks
        world = cls(setting, arena=(EMPTY,) * slabs, times_landed=(0,) * slabs)
        world._open(0)
        if setting.ghost:
            world._open(GHOST)
        world._grant(0)
        return world

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
        if writer == GHOST:
            ticket = replace(ticket, writer=self.departures[writer].writer)
        lock = Lock(self, writer) if self.setting.one_sided else departure.NoLock()
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
        outputs = self._departure(writer).written(outgoing, checksum(content), not self.setting.one_sided, 0.0)
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

    # what machines say

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
        right = checksum(content) == frame.checksum
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

    def _from_writer(
        self,
        writer: int,
        outputs: list[departure.Output],
        content: tuple[Tag, ...] | None = None,
        renewals: bool = True,
    ) -> None:
        machine = self.departures[writer]
        over = machine.state in departure.ENDED
        self.numbers[f"departure {writer}"] = number(machine.state if over else departure_key(machine))
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
        self.numbers[f"landing {attempt}"] = number(machine.state if over else landing_key(machine))
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
