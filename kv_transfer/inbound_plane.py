"""Decode's side of the transfer plane: one thread, one listening link, one machine (core/landing.py) per
ticket."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import assert_never

import xxhash

from baton.clock import Clock, steady
from baton.errors import BatonError, HandoffFailed, PeerGone, Stale, Unmappable
from baton.failpoints import FAILPOINTS, Action, Failpoints
from baton.fence import ArenaFences
from baton.kv_layout import KVLayout
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.core import frames, landing
from kv_transfer.core.events import Fenced, InboundEvent, Lost
from kv_transfer.core.landing import ArenaShape, Ignored, Landing
from kv_transfer.core.leases import Leases
from kv_transfer.plane_thread import PlaneThread, end_process
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_rows import Rows, SlabRows
from kv_transfer.transport import DecodeLink, Message, Pollable

_BATCH = 64  # messages handled before commands and timers get their turn again
_REMEMBERED = 4096  # ended tickets whose late frames still get the right answer


class InboundTransfer:
    """Implements plane.InboundPlane. Everything below `close` runs on the plane's thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        link: DecodeLink,
        fences: ArenaFences | None,
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[InboundEvent], None],
        clock: Clock = steady,
        failpoints: Failpoints = FAILPOINTS,
        on_defect: Callable[[], None] = end_process,
    ) -> None:
        """`fences` are the arena's, None if it is no segment: then no writer may be one-sided. Link and
        fences are the plane's own from now on."""
        self._slabs = SlabRows(arena, layout)
        self._layout = layout
        self._shape = ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes)
        self._incarnation = incarnation
        self._link = link
        self._fences = fences
        self._host_id = host_id
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self._failpoints = failpoints
        self._landings: dict[TicketId, Landing] = {}
        self._ended: OrderedDict[TicketId, Landing] = OrderedDict()
        self._routes: dict[TicketId, bytes] = {}
        self._hosts: dict[TicketId, str] = {}
        self._unmappable_hosts: set[str] = set()
        self._timers: Leases[TicketId] = Leases()
        self._counters: Counter[str] = Counter()
        self._more = False
        self._thread = PlaneThread("transfer-inbound", self, clock, settings.close_timeout, on_defect)
        self._thread.start()

    # called by the node, on any thread

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post(lambda: self._rejoin(incarnation))

    def choose_transport(self, writer_host_id: str) -> str:
        if self._settings.transport != "auto":
            return self._settings.transport
        same_host = writer_host_id == self._host_id and writer_host_id not in self._unmappable_hosts
        return "shm" if same_host and self._fences is not None else "zmq"

    def mint_fence(self) -> int:
        return self._fences.mint() if self._fences is not None else 0

    def grant(self, ticket: Ticket) -> None:
        """Raises ValueError for offsets that are no blocks of the arena."""
        if any(offset % self._layout.block_bytes or not 0 <= offset < self._slabs.size for offset in ticket.offsets):
            raise ValueError(
                f"ticket {ticket.id} names offsets that are no blocks of {self._slabs.size} bytes of arena"
            )
        if not self._thread.post(lambda: self._grant(ticket)):
            two_sided = ticket.transport != "shm"
            self._emit(Lost(ticket.id, HandoffFailed("the transfer plane is closed"), fenced=two_sided))

    def commit(self, ticket: TicketId) -> None:
        self._thread.post(lambda: self._commit(ticket))

    def revoke(self, ticket: TicketId, error: BatonError) -> None:
        self._thread.post(lambda: self._revoke(ticket, error))

    def peer_gone(self, writer: Incarnation) -> None:
        self._thread.post(lambda: self._peer_gone(writer))

    def counters(self) -> dict[str, float]:
        return {**self._counters, **self._link.counters()}

    def close(self) -> None:
        self._thread.close()

    # commands

    def _rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._revoke_all(Stale("decode has joined anew"))

    def _grant(self, ticket: Ticket) -> None:
        self._landings[ticket.id] = machine = Landing(
            ticket=ticket,
            shape=self._shape,
            fence=self._fence_of(ticket),
            credit=self._settings.credit_bytes,
            progress_timeout=self._settings.progress_timeout,
            lease=self._clock() + ticket.ttl,
        )
        self._counters["granted"] += 1
        self._arm(machine)
        if ticket.decode.incarnation != self._incarnation:
            self._revoke(ticket.id, Stale("decode has joined anew"))

    def _fence_of(self, ticket: Ticket) -> Callable[[], bool]:
        """Two-sided: bytes land on this very thread, so none can land while it decides."""
        fences = self._fences
        if ticket.transport != "shm":
            return lambda: True
        if fences is None:
            raise ValueError("a one-sided ticket for an arena without a fence file")
        return lambda: fences.close_off(ticket.fence)

    def _commit(self, ticket: TicketId) -> None:
        machine = self._landings.get(ticket)
        if machine is None:
            self._counters["ignored_commit"] += 1
            return
        action = self._hit_frame("transfer.commit.before")
        self._carry_out(machine, machine.commit(), self._routes.get(ticket), action)
        self._hit("transfer.commit.after")

    def _revoke(self, ticket: TicketId, error: BatonError) -> None:
        machine = self._landings.get(ticket)
        if machine is None:
            self._counters["ignored_revoke"] += 1
            return
        self._carry_out(machine, machine.revoke(error), self._routes.get(ticket))

    def _peer_gone(self, writer: Incarnation) -> None:
        for machine in list(self._landings.values()):
            if machine.ticket.writer == writer and machine.state in landing.IN_DOUBT:
                self._revoke(machine.ticket.id, PeerGone(f"writer {writer} is gone"))

    def _revoke_all(self, error: BatonError) -> None:
        for machine in list(self._landings.values()):
            if machine.state in landing.LIVE:
                self._revoke(machine.ticket.id, error)

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
        for ticket in self._timers.expire(self._clock()):
            machine = self._landings[ticket]
            if machine.state in landing.AWAITING_FENCE:
                self._counters["fence_retries"] += 1
            self._carry_out(machine, machine.tick(self._clock()), self._routes.get(ticket))

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
            self._counters["bad_frames"] += 1
            return
        ticket = TicketId(frame.ticket)
        machine = self._machine_of(ticket)
        if machine is None:
            self._thread.run_posted()  # its grant was posted before the ticket left, perhaps during this very turn
            machine = self._machine_of(ticket)
        if machine is None:
            self._counters["ignored_unknown"] += 1
            refused = frames.Refused(
                frame.ticket, frame.attempt, frame.writer, frame.decode, Stale.code, "there is no such ticket"
            )
            self._link.send(message.route, frames.encode(refused))
            return
        if machine.is_ours(frame):
            self._routes[ticket] = message.route
        self._carry_out(machine, self._handle(machine, frame, message), message.route)

    def _machine_of(self, ticket: TicketId) -> Landing | None:
        return self._landings.get(ticket) or self._ended.get(ticket)

    def _handle(self, machine: Landing, frame: frames.ToDecode, message: Message) -> list[landing.Output]:
        now = self._clock()
        match frame:
            case frames.Write():
                return self._on_write(machine, frame, message.payload)
            case frames.Open():
                if machine.is_ours(frame):
                    self._hosts[machine.ticket.id] = frame.host
                return machine.open(frame, now)
            case frames.Seal():
                return machine.seal(frame, now)
            case frames.Abort():
                if frame.code == Unmappable.code:
                    self._unmappable_hosts.add(self._hosts.get(machine.ticket.id, ""))
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
            right = self._land(machine.ticket, frame, payload, corrupt=action is Action.CORRUPT)
            outputs = machine.landed(frame, right, self._clock())
            self._failpoints.hit("transfer.land.after")
        except HandoffFailed as error:
            return machine.revoke(error)
        if right:
            self._counters["bytes_landed"] += frame.size
            self._counters["slabs_landed"] += frame.area.slabs
        if action is Action.DUPLICATE:
            outputs += self._on_write(machine, frame, payload)
        return outputs

    def _land(self, ticket: Ticket, frame: frames.Write, payload: memoryview | None, corrupt: bool) -> bool:
        """Bring an admitted Write's bytes into the arena, or read back those that the writer put there. False
        if they are not what the checksum says, in which case an inline payload has not touched the arena."""
        rows = self._rows_of(ticket, frame)
        one_sided = ticket.transport == "shm"
        if one_sided == frame.inline or (payload is None) == frame.inline:
            return False
        if one_sided:
            if corrupt:
                self._slabs.flip_bit(rows)
            return xxhash.xxh3_64_intdigest(self._slabs.gather(rows)) == frame.checksum
        assert payload is not None
        if corrupt:
            payload = flipped(payload)
        if len(payload) != frame.size or xxhash.xxh3_64_intdigest(payload) != frame.checksum:
            return False
        self._slabs.scatter(rows, payload)
        return True

    def _rows_of(self, ticket: Ticket, frame: frames.Write) -> Rows:
        first = frame.block - ticket.first_block
        offsets = ticket.offsets[first : first + frame.blocks]
        return self._slabs.rows(frame.area, [offset // self._layout.block_bytes for offset in offsets])

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
                    self._counters[f"ignored_{output.reason}"] += 1
                case frames.Frame():
                    if isinstance(output, frames.Refused):
                        self._counters[f"refused_{output.code}"] += 1
                    self._send(output, route, action)
                case _:
                    if isinstance(output, Lost):
                        self._counters["lost"] += 1
                        self._counters["quarantines"] += not output.fenced
                    elif isinstance(output, Fenced):
                        self._counters["quarantines_released"] += 1
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
            if self._landings.pop(ticket, None) is not None:
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
        self._timers.drop(ticket)
        self._routes.pop(ticket, None)
        self._hosts.pop(ticket, None)
        self._ended[ticket] = machine
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # failpoints

    def _hit(self, name: str) -> None:
        self._hit_frame(name)

    def _hit_frame(self, name: str) -> Action | None:
        """A failpoint of a frame that is no longer in doubt: an error there is the loss of the frame."""
        try:
            return self._failpoints.hit(name)
        except HandoffFailed:
            return Action.DROP


def flipped(data: memoryview) -> memoryview:
    """A copy with one bit of its first byte changed: the `corrupt` failpoint."""
    copy = bytearray(data)
    copy[0] ^= 1
    return memoryview(copy)
