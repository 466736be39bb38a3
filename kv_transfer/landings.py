"""Decode's tickets: one machine (core/landing.py) for each, the link that their frames come on, and their timers.
Everything here runs on the plane's thread."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from baton.clock import Clock
from baton.errors import BatonError, HandoffFailed, PeerGone, Stale, Unmappable
from baton.failpoints import Action, Failpoints
from baton.fence import ArenaFences
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.core import frames, landing
from kv_transfer.core.events import Fenced, InboundEvent, Lost
from kv_transfer.core.landing import ArenaShape, Ignored, Landing
from kv_transfer.core.leases import Leases
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_mover import SlabMover, flipped
from kv_transfer.transport import DecodeLink, Message, Pollable

_BATCH = 64  # messages handled before commands and timers get their turn again
_REMEMBERED = 1024  # ended tickets whose late frames still get the right answer


@dataclass(slots=True)
class _Granted:
    machine: Landing
    route: bytes | None = None  # of the link that its writer was last heard on
    host: str = ""


class Landings:
    def __init__(
        self,
        *,
        mover: SlabMover,
        shape: ArenaShape,
        link: DecodeLink,
        fences: ArenaFences | None,
        settings: TransferSettings,
        incarnation: Incarnation,
        emit: Callable[[InboundEvent], None],
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self.counters: Counter[str] = Counter()  # read by any thread
        self.unmappable_hosts: set[str] = set()  # read by any thread
        self.catch_up: Callable[[], None] = lambda: None  # run what was posted to this thread meanwhile
        self._mover = mover
        self._shape = shape
        self._link = link
        self._fences = fences
        self._settings = settings
        self._incarnation = incarnation
        self._emit = emit
        self._clock = clock
        self._failpoints = failpoints
        self._granted: dict[TicketId, _Granted] = {}
        self._ended: OrderedDict[TicketId, Landing] = OrderedDict()
        self._timers: Leases[TicketId] = Leases()
        self._more = False

    # what the node wants

    def grant(self, ticket: Ticket) -> None:
        machine = Landing(
            ticket=ticket,
            shape=self._shape,
            fence=self._fence_of(ticket),
            credit=self._settings.credit_bytes,
            progress_timeout=self._settings.progress_timeout,
            lease=self._clock() + ticket.ttl,
        )
        self._granted[ticket.id] = _Granted(machine)
        self.counters["granted"] += 1
        self._arm(machine)
        if ticket.decode.incarnation != self._incarnation:
            self.revoke(ticket.id, Stale("decode has joined anew"))

    def _fence_of(self, ticket: Ticket) -> Callable[[], bool]:
        """Two-sided: bytes land on this very thread, so none can land while it decides."""
        fences = self._fences
        if ticket.transport != "shm":
            return lambda: True
        assert fences is not None, "a one-sided ticket for an arena without a fence file"
        byte = ticket.fence
        return lambda: fences.close_off(byte)

    def commit(self, ticket: TicketId) -> None:
        granted = self._granted.get(ticket)
        if granted is None:
            self.counters["ignored_commit"] += 1
            return
        action = self._hit("transfer.commit.before")
        self._carry_out(granted.machine, granted.machine.commit(), granted.route, action)
        self._hit("transfer.commit.after")

    def revoke(self, ticket: TicketId, error: BatonError) -> None:
        granted = self._granted.get(ticket)
        if granted is None:
            self.counters["ignored_revoke"] += 1
            return
        self._carry_out(granted.machine, granted.machine.revoke(error), granted.route)

    def peer_gone(self, writer: Incarnation) -> None:
        for machine in self._machines(landing.IN_DOUBT):
            if machine.ticket.writer == writer:
                self.revoke(machine.ticket.id, PeerGone(f"writer {writer} is gone"))

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._revoke_all(Stale("decode has joined anew"))

    def _revoke_all(self, error: BatonError) -> None:
        for machine in self._machines(landing.LIVE):
            self.revoke(machine.ticket.id, error)

    def _machines(self, states: frozenset[landing.LandingState]) -> list[Landing]:
        return [granted.machine for granted in self._granted.values() if granted.machine.state in states]

    # the thread's turn

    def turn(self) -> None:
        self._more = False
        for _ in range(_BATCH):
            message = self._link.receive()
            if message is None:
                break
            self._on_message(message)
        else:
            self._more = True
        now = self._clock()
        for ticket in self._timers.expire(now):
            granted = self._granted[ticket]
            if granted.machine.state in landing.AWAITING_FENCE:
                self.counters["fence_retries"] += 1
            self._carry_out(granted.machine, granted.machine.tick(now), granted.route)

    def next_deadline(self) -> float:
        if self._more:
            return self._clock()
        deadline = self._timers.next_deadline()
        return landing.NEVER if deadline is None else deadline

    def watched(self) -> Sequence[tuple[Pollable, bool]]:
        return [(pollable, False) for pollable in self._link.readable()]

    def say_goodbye(self) -> None:
        self._revoke_all(HandoffFailed("the transfer plane is closing"))

    def heard_out(self) -> bool:
        """A writer that misses the news finds its link gone."""
        return True

    def shut(self) -> None:
        self._link.close()
        if self._fences is not None:
            self._fences.close()

    # frames

    def _on_message(self, message: Message) -> None:
        try:
            frame = frames.decode_to_decode(message.header)
        except frames.BadFrame:
            self.counters["bad_frames"] += 1
            return
        ticket = TicketId(frame.ticket)
        if ticket not in self._granted:
            self.catch_up()  # its grant was posted before the ticket left, perhaps during this very turn
        granted = self._granted.get(ticket)
        machine = granted.machine if granted else self._ended.get(ticket)
        if machine is None:
            self._refuse_unknown(frame, message.route)
            return
        if granted and machine.is_ours(frame):
            granted.route = message.route
            self._note_host(granted, frame)
        self._carry_out(machine, self._handle(machine, frame, message.payload), message.route)

    def _refuse_unknown(self, frame: frames.ToDecode, route: bytes) -> None:
        self.counters["ignored_unknown"] += 1
        ids = (frame.ticket, frame.attempt, frame.writer, frame.decode)
        self._link.send(route, frames.encode(frames.Refused(*ids, Stale.code, "there is no such ticket")))

    def _note_host(self, granted: _Granted, frame: frames.ToDecode) -> None:
        """Remember hosts that look like ours and are not, so that the next ticket for them goes over the network."""
        if isinstance(frame, frames.Open):
            granted.host = frame.host
        elif isinstance(frame, frames.Abort) and frame.code == Unmappable.code:
            self.unmappable_hosts.add(granted.host)

    def _handle(self, machine: Landing, frame: frames.ToDecode, payload: memoryview | None) -> list[landing.Output]:
        now = self._clock()
        match frame:
            case frames.Write():
                return self._on_write(machine, frame, payload)
            case frames.Open():
                return machine.open(frame, now)
            case frames.Seal():
                return machine.seal(frame, now)
            case frames.Abort():
                return machine.abort(frame)
            case frames.Renew():
                return machine.renew(frame, now)
            case _:
                assert_never(frame)

    def _on_write(self, machine: Landing, frame: frames.Write, payload: memoryview | None) -> list[landing.Output]:
        admitted, outputs = machine.admit(frame, self._clock())
        if not admitted:
            return outputs
        try:
            action = self._failpoints.hit("transfer.land.before")
            if action is Action.DROP:
                return []
            right = self._mover.land(machine.ticket, frame, payload, action)
            outputs = machine.landed(frame, right, self._clock())
            self._failpoints.hit("transfer.land.after")
        except HandoffFailed as error:
            return [*outputs, *machine.revoke(error)]
        if right:
            self.counters["bytes_landed"] += frame.size
            self.counters["slabs_landed"] += frame.area.slabs
        if action is Action.DUPLICATE:
            outputs += self._on_write(machine, frame, payload)
        return outputs

    # outputs

    def _carry_out(
        self,
        machine: Landing,
        outputs: list[landing.Output],
        route: bytes | None,
        action: Action | None = None,
    ) -> None:
        for output in outputs:
            match output:
                case Ignored():
                    self.counters[f"ignored_{output.reason}"] += 1
                case frames.Frame():
                    if isinstance(output, frames.Refused):
                        self.counters[f"refused_{output.code}"] += 1
                    self._send(output, route, action)
                case _:
                    if isinstance(output, Lost):
                        self.counters["lost"] += 1
                        self.counters["quarantines"] += not output.fenced
                    elif isinstance(output, Fenced):
                        self.counters["quarantines_released"] += 1
                    self._emit(output)
        self._arm(machine)

    def _send(self, frame: frames.ToWriter, route: bytes | None, action: Action | None) -> None:
        if route is None or action is Action.DROP:
            return
        header = frames.encode(frame)
        if action is Action.CORRUPT:
            header = bytes(flipped(memoryview(header)))
        for _ in range(2 if action is Action.DUPLICATE else 1):
            self._link.send(route, header)

    def _arm(self, machine: Landing) -> None:
        """Set the ticket's timer to its next deadline, or retire it."""
        ticket = machine.ticket.id
        if machine.state in landing.ENDED:
            self._retire(machine)
            return
        deadline = machine.deadline
        if machine.state in landing.AWAITING_FENCE:
            deadline = min(deadline, self._clock() + self._settings.fence_retry)
        if deadline < landing.NEVER:
            self._timers.set(ticket, deadline)
        else:
            self._timers.drop(ticket)

    def _retire(self, machine: Landing) -> None:
        ticket = machine.ticket.id
        if self._granted.pop(ticket, None) is None:
            return
        self._timers.drop(ticket)
        machine.forget_slabs()
        self._ended[ticket] = machine
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _hit(self, name: str) -> Action | None:
        """A failpoint of a frame whose hand-off is decided: an error there loses the frame."""
        try:
            return self._failpoints.hit(name)
        except HandoffFailed:
            return Action.DROP
