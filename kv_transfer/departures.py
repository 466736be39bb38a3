"""Prefill's hand-offs: one machine (core/departure.py) for each, the links to decode nodes and the peers' arenas that
are mapped here. Everything runs on the plane's thread."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.clock import Clock
from baton.errors import BatonError, HandoffFailed, PeerGone, Stale
from baton.failpoints import Action, Failpoints
from baton.types import AttemptKey, Incarnation, Ticket, TicketId
from kv_transfer.core import departure, frames
from kv_transfer.core.departure import Departure, NoLock, Pace
from kv_transfer.core.events import Aborted, Committed, LayerLanded, OutboundEvent
from kv_transfer.core.landing import NEVER, ArenaShape, Ignored
from kv_transfer.peer_arena import PeerArena, PeerArenas, TicketLock
from kv_transfer.peer_links import Peer, PeerLink, PeerLinks
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_mover import SlabMover, flipped
from kv_transfer.transport import Loss, Pollable

_ROUNDS = 4  # messages written per hand-off before links and commands get their turn again
_BATCH = 64  # frames handled per link before writing gets its turn again


@dataclass(slots=True)
class Waiter:
    """A thread that waits for a layer to land."""

    layer: int
    done: threading.Event = field(default_factory=threading.Event)
    landed: bool = False


@dataclass(slots=True)
class _Handoff:
    machine: Departure
    peer: Peer | None = None
    arena: PeerArena | None = None  # the peer's, if its blocks are written in place
    waiters: list[Waiter] = field(default_factory=list)


class Departures:
    def __init__(
        self,
        *,
        mover: SlabMover,
        shape: ArenaShape,
        links: PeerLinks,
        arenas: PeerArenas,
        host_id: str,
        settings: TransferSettings,
        incarnation: Incarnation,
        emit: Callable[[OutboundEvent], None],
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self.counters: Counter[str] = Counter()  # read by any thread
        self._mover = mover
        self._shape = shape
        self._links = links
        self._arenas = arenas
        self._host_id = host_id
        self._settings = settings
        self._incarnation = incarnation
        self._emit = emit
        self._clock = clock
        self._failpoints = failpoints
        self._pace = Pace(
            max_payload=settings.max_payload_bytes,
            layers_per_message=settings.layers_per_message,
            window=settings.credit_bytes,
            renew_interval=settings.renew_interval,
            answer_timeout=settings.progress_timeout,
        )
        self._handoffs: dict[AttemptKey, _Handoff] = {}
        self._tickets: dict[TicketId, AttemptKey] = {}
        self._more = False

    # what the node wants

    def open(self, key: AttemptKey, blocks: int) -> None:
        if key in self._handoffs:
            self.counters["ignored_open"] += 1
            return
        machine = Departure(key, self._incarnation, self._shape, blocks, self._pace, self._host_id)
        self._handoffs[key] = _Handoff(machine)
        self.counters["opened"] += 1

    def ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.peer is not None:
            self.counters["ignored_ticket"] += 1
            return
        machine, endpoint = handoff.machine, ticket.decode.transfer_endpoint
        if not self._links.can_dial(endpoint):
            self._carry_out(handoff, machine.abort(PeerGone(f"no transport dials {endpoint[:200]!r}")))
            return
        handoff.peer = (endpoint, ticket.decode.incarnation)
        self._leave_former_lives(handoff.peer)
        try:
            self._grant(handoff, ticket, self._lock_of(handoff, ticket))
        except HandoffFailed as error:  # decode is told why, and may offer another transport
            self._grant(handoff, ticket, NoLock())
            self._carry_out(handoff, machine.abort(error))

    def _grant(self, handoff: _Handoff, ticket: Ticket, lock: departure.WriterLock) -> None:
        outputs = handoff.machine.grant(ticket, lock, self._clock())
        if handoff.machine.ticket is not None:  # the machine has taken it
            self._tickets[ticket.id] = handoff.machine.key
        self._carry_out(handoff, outputs)

    def _lock_of(self, handoff: _Handoff, ticket: Ticket) -> departure.WriterLock:
        """Raises Unmappable."""
        if ticket.transport != "shm":
            return NoLock()
        handoff.arena = self._arenas.get(ticket)
        return TicketLock(handoff.arena, ticket)

    def tell(self, key: AttemptKey, what: Callable[[Departure], list[departure.Output]]) -> None:
        """Pass an input on to the machine of `key`, if there is one."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.counters["ignored_unknown"] += 1
            return
        self._carry_out(handoff, what(handoff.machine))

    def wait(self, key: AttemptKey, waiter: Waiter) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            waiter.done.set()
            return
        handoff.waiters.append(waiter)
        self._wake_waiters(handoff)

    def peer_gone(self, decode: Incarnation) -> None:
        error = PeerGone(f"decode node {decode} is gone")
        for handoff in list(self._handoffs.values()):
            if handoff.peer is not None and handoff.peer[1] == decode:
                self._carry_out(handoff, handoff.machine.abort(error))
        for peer, _ in self._links.each():
            if peer[1] == decode:
                self._links.drop(peer)
        self._arenas.drop(decode)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._abort_all(Stale("this node has joined anew"))

    def _abort_all(self, error: BatonError) -> None:
        for handoff in list(self._handoffs.values()):
            self._carry_out(handoff, handoff.machine.abort(error))

    # the thread's turn

    def turn(self) -> None:
        self._more = False
        for peer, link in self._links.each():
            self._receive(link)
            link.flush()
            if (loss := link.loss()) is not None:
                self._lose(peer, loss)
        for handoff in list(self._handoffs.values()):
            self._tick(handoff, self._clock())
        for _ in range(_ROUNDS):
            if not any([self._write_next(handoff) for handoff in list(self._handoffs.values())]):
                return
        self._more = True

    def next_deadline(self) -> float:
        if self._more:
            return self._clock()
        return min((handoff.machine.deadline for handoff in self._handoffs.values()), default=NEVER)

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        return self._links.watched()

    def say_goodbye(self) -> None:
        self._abort_all(HandoffFailed("the transfer plane is closing"))

    def heard_out(self) -> bool:
        return self._links.acknowledged()

    def shut(self) -> None:
        self._links.close()
        self._arenas.close()

    # links

    def _leave_former_lives(self, peer: Peer) -> None:
        """An endpoint has one incarnation at a time: close links to earlier ones, of whose end nobody may have told us
        (a coordinator that is started again does not know them), once nothing of theirs is under way."""
        in_use = {handoff.peer for handoff in self._handoffs.values()}
        for other, link in self._links.each():
            if other[0] == peer[0] and other not in in_use and not link.unacknowledged:
                self._links.drop(other)

    def _receive(self, link: PeerLink) -> None:
        for _ in range(_BATCH):
            try:
                frame = link.receive(self._clock())
            except frames.BadFrame:
                self.counters["bad_frames"] += 1
                continue
            if frame is None:
                return
            self._on_frame(frame)
        self._more = True

    def _on_frame(self, frame: frames.ToWriter) -> None:
        key = self._tickets.get(TicketId(frame.ticket))
        if key is None:
            self.counters["ignored_unknown"] += 1
            return
        handoff = self._handoffs[key]
        machine, now = handoff.machine, self._clock()
        match frame:
            case frames.Credit():
                outputs = machine.credit(frame)
            case frames.Landed():
                outputs = machine.landed(frame, now)
            case frames.Committed():
                outputs = machine.committed(frame, now)
            case frames.Refused():
                outputs = machine.refused(frame)
            case _:
                assert_never(frame)
        self._carry_out(handoff, outputs)

    def _tick(self, handoff: _Handoff, now: float) -> None:
        if now < handoff.machine.deadline:
            return
        peer, unanswered = handoff.peer, handoff.machine.unanswered(now)
        self._carry_out(handoff, handoff.machine.tick(now))
        link = self._links.get(peer) if unanswered and peer is not None else None
        if link is not None and peer is not None and now - link.heard >= self._settings.progress_timeout:
            # The peer may live, but this link leads nowhere: the next hand-off dials anew.
            self._lose(peer, Loss(PeerGone(f"transfer link to {peer[0]}: silent (progress_timeout)"), was_up=True))

    def _lose(self, peer: Peer, loss: Loss) -> None:
        self.counters["links_lost"] += 1
        self._links.drop(peer)
        for handoff in list(self._handoffs.values()):
            if handoff.peer == peer:
                self._carry_out(handoff, handoff.machine.link_lost(loss.error, loss.was_up))
        if not any(handoff.arena and handoff.peer == peer for handoff in self._handoffs.values()):
            self._arenas.drop(peer[1])

    # writing

    def _write_next(self, handoff: _Handoff) -> bool:
        """Write one message's worth of what is ready, if anything; the next hand-off then has its turn."""
        link = self._links.get(handoff.peer) if handoff.peer is not None else None
        if link is not None and link.full:
            return False
        outgoing, outputs = handoff.machine.next_write()
        self._carry_out(handoff, outputs)
        if outgoing is None:
            return False
        try:
            action = self._failpoints.hit("transfer.write.before")
            payload, checksum = self._mover.read(outgoing, action)
            if handoff.arena is not None and handoff.machine.ticket is not None:
                handoff.arena.mover.place(handoff.machine.ticket, outgoing.area, payload)
            self._failpoints.hit("transfer.write.after")
        except HandoffFailed as error:
            self._carry_out(handoff, handoff.machine.write_failed(error))
            return True
        self.counters["bytes_written"] += len(payload)
        self.counters["slabs_written"] += outgoing.area.slabs
        inline = handoff.arena is None
        outputs = handoff.machine.written(outgoing, checksum, inline, self._clock())
        self._carry_out(handoff, outputs, payload if inline else None, action)
        return True

    # outputs

    def _carry_out(
        self,
        handoff: _Handoff,
        outputs: list[departure.Output],
        payload: memoryview | None = None,
        action: Action | None = None,
    ) -> None:
        for output in outputs:
            match output:
                case Ignored():
                    self.counters[f"ignored_{output.reason}"] += 1
                case frames.Write():
                    self._send(handoff, output, payload, action)
                case frames.Seal():
                    self._send_seal(handoff, output)
                case frames.Frame():
                    self._send(handoff, output)
                case LayerLanded():
                    self._emit(output)
                case Committed() | Aborted():
                    self._end(handoff, output)
                case _:
                    assert_never(output)
        self._wake_waiters(handoff)

    def _send_seal(self, handoff: _Handoff, frame: frames.Seal) -> None:
        try:
            action = self._failpoints.hit("transfer.seal.before")
            self._send(handoff, frame, None, action)
            self._failpoints.hit("transfer.seal.after")
        except HandoffFailed as error:
            self._carry_out(handoff, handoff.machine.abort(error))

    def _send(
        self,
        handoff: _Handoff,
        frame: frames.ToDecode,
        payload: memoryview | None = None,
        action: Action | None = None,
    ) -> None:
        if action is Action.DROP:
            return
        assert handoff.peer is not None
        link = self._links.to(handoff.peer, self._clock())
        if isinstance(frame, frames.Abort):
            link.unacknowledged.add(TicketId(frame.ticket))
        header = frames.encode(frame)
        if action is Action.CORRUPT and not isinstance(frame, frames.Write):  # a Write's payload was corrupted
            header = bytes(flipped(memoryview(header)))
        for _ in range(2 if action is Action.DUPLICATE else 1):
            link.send(header, payload)

    def _end(self, handoff: _Handoff, event: Committed | Aborted) -> None:
        machine = handoff.machine
        del self._handoffs[machine.key]
        if machine.ticket is not None:
            self._tickets.pop(machine.ticket.id, None)
        self.counters["committed" if isinstance(event, Committed) else f"aborted_{event.error.code}"] += 1
        self._emit(event)

    def _wake_waiters(self, handoff: _Handoff) -> None:
        ended = handoff.machine.state in departure.ENDED
        for waiter in list(handoff.waiters):
            waiter.landed = not ended and handoff.machine.layer_has_landed(waiter.layer)
            if waiter.landed or ended:
                handoff.waiters.remove(waiter)
                waiter.done.set()
