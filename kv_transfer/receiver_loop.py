"""Decode's open tickets: a state machine for each (core/inbound_handoff.py), their link and timers.

Everything here runs on the plane's thread.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from baton.errors import BatonError, HandoffFailed, PeerUnreachable, StaleMessage, UnmappableSegment
from baton.process.clock import Clock
from baton.process.failpoints import FailpointAction, Failpoints
from baton.shared_memory.fence import ArenaFences
from baton.types import Incarnation, Ticket, TicketId
from kv_transfer.arena.slab_copier import SlabCopier
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core import frames
from kv_transfer.core.events import InboundEvent, InboundFenced, InboundLost
from kv_transfer.core.handoff_common import NEVER, ArenaShape, IgnoredInput, is_one_sided
from kv_transfer.core.inbound_handoff import (
    AWAITING_FENCE_STATES,
    LIVE_STATES,
    TERMINAL_STATES,
    UNSEALED_STATES,
    InboundHandoff,
    InboundOutput,
    InboundState,
)
from kv_transfer.core.lease_table import LeaseTable
from kv_transfer.device.device_landing import DeviceLanding, DeviceLandings
from kv_transfer.device.device_memory import QueuedWork, TransferDevice
from kv_transfer.transports.links import DecodeLink, LinkMessage, Pollable

_MESSAGES_PER_TURN = 64  # messages handled before commands and timers get their turn again
_MAX_ENDED_TICKETS = 1024  # ended tickets whose late frames still get the right answer


@dataclass(slots=True)
class _GrantedTicket:
    machine: InboundHandoff
    reply_route: bytes | None = None  # the link on which its writer last sent a frame
    host_id: str = ""  # of its writer
    landing: DeviceLanding | None = None  # if its writer is a device


class ReceiverLoop:
    """Drives the hand-offs of a KVReceiver. Implements PlaneLoop."""

    def __init__(
        self,
        *,
        copier: SlabCopier,
        shape: ArenaShape,
        link: DecodeLink,
        fences: ArenaFences | None,
        settings: TransferSettings,
        incarnation: Incarnation,
        emit: Callable[[InboundEvent], None],
        clock: Clock,
        failpoints: Failpoints,
        device: TransferDevice | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()  # read by any thread
        self.unmappable_hosts: set[str] = set()  # read by any thread
        # Runs the commands posted to this thread up to now.
        self.run_posted_commands: Callable[[], None] = lambda: None
        # Runs a command on this thread; called from threads of the device.
        self.post_command: Callable[[Callable[[], None]], bool] = lambda _: False
        self._copier = copier
        self._shape = shape
        self._link = link
        self._fences = fences
        self._settings = settings
        self._incarnation = incarnation
        self._emit = emit
        self._clock = clock
        self._failpoints = failpoints
        self._granted: dict[TicketId, _GrantedTicket] = {}
        self._ended_handoffs: OrderedDict[TicketId, InboundHandoff] = OrderedDict()
        self._timers: LeaseTable[TicketId] = LeaseTable()
        self._has_more_work = False
        self.landings = None if device is None else self._make_landings(device)

    def _make_landings(self, device: TransferDevice) -> DeviceLandings:
        return DeviceLandings(
            device,
            self._settings.segment_folder,
            self._shape.num_layers * self._shape.slab_bytes,
            lambda command: self.post_command(command),
            self._apply_to_route,
            self._count_landed,
            self._clock,
            self._failpoints,
        )

    # commands of the node

    def grant_ticket(self, ticket: Ticket, queued_steps: QueuedWork | None = None) -> None:
        """`queued_steps`: what the node's device computes now, if the writer is a device."""
        machine = InboundHandoff(
            ticket=ticket,
            shape=self._shape,
            try_fence=self._fence_callable(ticket),
            credit_bytes=self._settings.credit_bytes,
            progress_timeout=self._settings.progress_timeout,
            lease_deadline=self._clock() + ticket.ttl_seconds,
        )
        granted = self._granted[ticket.id] = _GrantedTicket(machine)
        if queued_steps is not None:
            assert self._fences is not None
            assert self.landings is not None
            machine.credit_bytes = self._settings.device_credit_bytes
            granted.landing = self.landings.make_landing(machine, self._fences, queued_steps)
        self.counters["granted"] += 1
        self._update_timer(machine)
        if ticket.decode_peer.incarnation != self._incarnation:
            self.revoke_ticket(
                ticket.id, StaleMessage("decode has rejoined with a new incarnation")
            )

    def _fence_callable(self, ticket: Ticket) -> Callable[[], bool]:
        """How to fence the ticket's writer off for good; see InboundHandoff.try_fence.

        A two-sided writer's bytes land on this very thread, so none can land while it decides."""
        fences = self._fences
        if not is_one_sided(ticket.transport):
            return lambda: True
        assert fences is not None, "a one-sided ticket for an arena without a fence file"
        byte = ticket.fence_byte
        return lambda: fences.try_close_byte(byte)

    def commit_ticket(self, ticket: TicketId) -> None:
        granted = self._granted.get(ticket)
        if granted is None:
            self.counters["ignored_commit"] += 1
            return
        action = self._hit_failpoint("transfer.commit.before")
        self._apply_outputs(granted.machine, granted.machine.commit(), granted.reply_route, action)
        self._hit_failpoint("transfer.commit.after")

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        granted = self._granted.get(ticket)
        if granted is None:
            self.counters["ignored_revoke"] += 1
            return
        self._apply_outputs(granted.machine, granted.machine.revoke(error), granted.reply_route)

    def on_peer_gone(self, writer: Incarnation) -> None:
        for machine in self._machines(UNSEALED_STATES):
            if machine.ticket.writer_incarnation == writer:
                self.revoke_ticket(machine.ticket.id, PeerUnreachable(f"writer {writer} is gone"))

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._revoke_all(StaleMessage("decode has rejoined with a new incarnation"))

    def _revoke_all(self, error: BatonError) -> None:
        for machine in self._machines(LIVE_STATES):
            self.revoke_ticket(machine.ticket.id, error)

    def _machines(self, states: frozenset[InboundState]) -> list[InboundHandoff]:
        return [
            granted.machine for granted in self._granted.values() if granted.machine.state in states
        ]

    # PlaneLoop

    def poll_once(self) -> None:
        self._has_more_work = False
        for _ in range(_MESSAGES_PER_TURN):
            message = self._link.receive()
            if message is None:
                break
            self._on_message(message)
        else:
            self._has_more_work = True
        if self.landings is not None:
            self.landings.poll()
        now = self._clock()
        for ticket in self._timers.pop_expired(now):
            granted = self._granted[ticket]
            if granted.machine.state in AWAITING_FENCE_STATES:
                self.counters["fence_retries"] += 1
            self._apply_outputs(granted.machine, granted.machine.tick(now), granted.reply_route)

    def next_deadline(self) -> float:
        if self._has_more_work:
            return self._clock()
        deadline = self._timers.next_deadline()
        waiting = NEVER if self.landings is None else self.landings.deadline
        return waiting if deadline is None else min(deadline, waiting)

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        return [(pollable, False) for pollable in self._link.read_pollables()]

    def begin_close(self) -> None:
        self._revoke_all(HandoffFailed("the transfer plane is closing"))

    def is_drained(self) -> bool:
        """Always true: a writer that misses its Refused frame finds its link lost."""
        return True

    def close(self) -> None:
        self._link.close()
        if self.landings is not None:
            self.landings.close()
        if self._fences is not None:
            self._fences.close()

    # frames

    def _on_message(self, message: LinkMessage) -> None:
        try:
            frame = frames.parse_frame_to_decode(message.header)
        except frames.BadFrame:
            self.counters["bad_frames"] += 1
            return
        ticket = TicketId(frame.ticket_id)
        if ticket not in self._granted:
            # The grant was posted before the ticket left the node, perhaps during this turn.
            self.run_posted_commands()
        granted = self._granted.get(ticket)
        machine = granted.machine if granted else self._ended_handoffs.get(ticket)
        if machine is None:
            self._refuse_unknown(frame, message.reply_route)
            return
        if granted and machine.is_current_frame(frame):
            granted.reply_route = message.reply_route
            self._remember_host(granted, frame)
            if (
                self.landings is not None
                and granted.landing is not None
                and isinstance(frame, frames.OpenFrame | frames.WriteFrame | frames.SealFrame)
            ):
                self.landings.on_frame(granted.landing, frame, message.payload)
                return
        self._apply_outputs(
            machine, self._dispatch_frame(machine, frame, message.payload), message.reply_route
        )

    def _refuse_unknown(self, frame: frames.FrameToDecode, route: bytes) -> None:
        self.counters["ignored_unknown"] += 1
        refusal = frames.RefusedFrame(*frame.ids, StaleMessage.code, "there is no such ticket")
        self._link.send(route, frames.encode_frame(refusal))

    def _remember_host(self, granted: _GrantedTicket, frame: frames.FrameToDecode) -> None:
        """Remember who cannot map this arena: the next ticket for them uses another transport."""
        if isinstance(frame, frames.OpenFrame):
            granted.host_id = frame.host_id
        elif isinstance(frame, frames.AbortFrame) and frame.code == UnmappableSegment.code:
            if granted.landing is None or self.landings is None:
                self.unmappable_hosts.add(granted.host_id)
            else:
                self.landings.exclude_writer(
                    granted.landing.writer_name, UnmappableSegment(frame.message)
                )

    def _dispatch_frame(
        self, machine: InboundHandoff, frame: frames.FrameToDecode, payload: memoryview | None
    ) -> list[InboundOutput]:
        now = self._clock()
        match frame:
            case frames.WriteFrame():
                return self._on_write(machine, frame, payload)
            case frames.OpenFrame():
                return machine.on_open(frame, now)
            case frames.SealFrame():
                return machine.on_seal(frame, now)
            case frames.AbortFrame():
                return machine.on_abort(frame)
            case frames.RenewFrame():
                return machine.on_renew(frame, now)
            case _:
                assert_never(frame)

    def _on_write(
        self, machine: InboundHandoff, frame: frames.WriteFrame, payload: memoryview | None
    ) -> list[InboundOutput]:
        admitted, outputs = machine.check_write(frame, self._clock())
        if not admitted:
            return outputs
        try:
            action = self._failpoints.hit("transfer.land.before")
            if action is FailpointAction.DROP:
                return []
            right = self._copier.receive_write(machine.ticket, frame, payload, action)
            outputs = machine.finish_write(frame, right, self._clock())
            self._failpoints.hit("transfer.land.after")
        except HandoffFailed as error:
            return [*outputs, *machine.revoke(error)]
        if right:
            self._count_landed(frame)
        if action is FailpointAction.DUPLICATE:
            outputs += self._on_write(machine, frame, payload)
        return outputs

    def _count_landed(self, frame: frames.WriteFrame) -> None:
        self.counters["bytes_landed"] += frame.payload_bytes
        self.counters["slabs_landed"] += frame.slab_range.num_slabs

    # outputs

    def _apply_to_route(self, machine: InboundHandoff, outputs: list[InboundOutput]) -> None:
        """Apply outputs of an input that no frame of this moment has caused."""
        granted = self._granted.get(machine.ticket.id)
        if granted is not None:
            self._apply_outputs(machine, outputs, granted.reply_route)

    def _apply_outputs(
        self,
        machine: InboundHandoff,
        outputs: list[InboundOutput],
        route: bytes | None,
        action: FailpointAction | None = None,
    ) -> None:
        for output in outputs:
            match output:
                case IgnoredInput():
                    self.counters[f"ignored_{output.reason}"] += 1
                case frames.Frame():
                    if isinstance(output, frames.RefusedFrame):
                        self.counters[f"refused_{output.code}"] += 1
                    self._send(output, route, action)
                case _:
                    if isinstance(output, InboundLost):
                        self.counters["lost"] += 1
                        self.counters["quarantines"] += not output.is_fenced
                    elif isinstance(output, InboundFenced):
                        self.counters["quarantines_released"] += 1
                    self._emit(output)
        self._update_timer(machine)

    def _send(
        self, frame: frames.FrameToWriter, route: bytes | None, action: FailpointAction | None
    ) -> None:
        if route is None or action is FailpointAction.DROP:
            return
        header = frames.encode_frame(frame)
        if action is FailpointAction.CORRUPT:
            header = frames.corrupt_header(header)
        for _ in range(2 if action is FailpointAction.DUPLICATE else 1):
            self._link.send(route, header)

    def _update_timer(self, machine: InboundHandoff) -> None:
        """Set the ticket's timer to its next deadline, or retire the ticket if it has ended."""
        ticket = machine.ticket.id
        if machine.state in TERMINAL_STATES:
            self._retire(machine)
            return
        deadline = machine.deadline
        if machine.state in AWAITING_FENCE_STATES:
            deadline = min(deadline, self._clock() + self._settings.fence_retry_interval)
        if deadline < NEVER:
            self._timers.set_deadline(ticket, deadline)
        else:
            self._timers.remove_lease(ticket)

    def _retire(self, machine: InboundHandoff) -> None:
        """Keep only what late frames of the ended ticket are answered with."""
        ticket = machine.ticket.id
        if self._granted.pop(ticket, None) is None:
            return
        self._timers.remove_lease(ticket)
        machine.discard_slabs()
        self._ended_handoffs[ticket] = machine
        if len(self._ended_handoffs) > _MAX_ENDED_TICKETS:
            self._ended_handoffs.popitem(last=False)

    def _hit_failpoint(self, name: str) -> FailpointAction | None:
        """Hit a failpoint of the Committed frame. An error there only loses the frame."""
        try:
            return self._failpoints.hit(name)
        except HandoffFailed:
            return FailpointAction.DROP
