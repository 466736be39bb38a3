"""Prefill's open hand-offs: a state machine for each (core/outbound_handoff.py), and their links.

Everything here runs on the plane's thread.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from baton.errors import BatonError, HandoffFailed, PeerUnreachable, StaleMessage
from baton.process.clock import Clock
from baton.process.failpoints import FailpointAction, Failpoints
from baton.types import AttemptKey, Incarnation, Ticket, TicketId
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core import frames
from kv_transfer.core.events import OutboundAborted, OutboundCommitted, OutboundEvent
from kv_transfer.core.handoff_common import NEVER, IgnoredInput
from kv_transfer.core.link_costs import LinkCost, LinkCostEstimator, LinkUsage
from kv_transfer.core.outbound_handoff import OutboundHandoff, OutboundOutput
from kv_transfer.core.send_queue import OutgoingWrite
from kv_transfer.core.writer_lock import NoLock, WriterLock
from kv_transfer.layer_waiter import LayerWaiter
from kv_transfer.slab_writers import SlabWriters, WritePath, WrittenSlabs
from kv_transfer.transports.links import LinkLoss, PeerKey, PeerLink, PeerLinks, Pollable

_WRITES_PER_TURN = 4  # messages written per hand-off before links and commands get their turn again
HandoffInput = Callable[[OutboundHandoff], list[OutboundOutput]]
_FRAMES_PER_TURN = 64  # frames handled per link before writing gets its turn again


@dataclass(slots=True)
class _ActiveHandoff:
    machine: OutboundHandoff
    peer_key: PeerKey | None = None  # known with the ticket
    path: WritePath | None = None  # known with the ticket, if this node can write under it
    waiters: list[LayerWaiter] = field(default_factory=list)
    link_usage: LinkUsage = field(default_factory=LinkUsage)


class SenderLoop:
    """Drives the hand-offs of a KVSender. Implements PlaneLoop."""

    def __init__(
        self,
        *,
        writers: SlabWriters,
        links: PeerLinks,
        host_id: str,
        settings: TransferSettings,
        incarnation: Incarnation,
        emit: Callable[[OutboundEvent], None],
        clock: Clock,
        failpoints: Failpoints,
    ) -> None:
        self.counters: Counter[str] = Counter()  # read by any thread
        self._writers = writers
        self._shape = writers.shape
        self._links = links
        self._host_id = host_id
        self._settings = settings
        self._incarnation = incarnation
        self._emit = emit
        self._clock = clock
        self._failpoints = failpoints
        self._send_settings = settings.make_send_settings()
        self._handoffs: dict[AttemptKey, _ActiveHandoff] = {}
        self._keys_by_ticket: dict[TicketId, AttemptKey] = {}
        self._has_more_work = False
        # Of the link that was used last; read by any thread.
        self.link_cost = LinkCost(max_payload_bytes=settings.max_payload_bytes)
        self._link_costs: dict[str, LinkCostEstimator] = {}  # by transport

    # commands of the node

    def open_handoff(self, key: AttemptKey, blocks: int) -> None:
        if key in self._handoffs:
            self.counters["ignored_open"] += 1
            return
        machine = OutboundHandoff(
            key,
            self._incarnation,
            self._shape,
            blocks,
            self._send_settings,
            self._host_id,
            self._writers.writer_process,
        )
        self._handoffs[key] = _ActiveHandoff(machine)
        self.counters["opened"] += 1

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.peer_key is not None:
            self.counters["ignored_ticket"] += 1
            return
        machine = handoff.machine
        try:
            endpoint = self._links.choose_endpoint(ticket)
        except PeerUnreachable as error:
            self._apply_outputs(handoff, machine.abort(error))
            return
        handoff.peer_key = (endpoint, ticket.decode_peer.incarnation)
        self._close_stale_links(handoff.peer_key)
        try:
            handoff.path = self._writers.open_path(ticket)
            machine.settings = handoff.path.settings
            self._set_machine_ticket(handoff, ticket, handoff.path.lock)
        except HandoffFailed as error:  # the Abort tells decode why; it may offer another transport
            self._set_machine_ticket(handoff, ticket, NoLock())
            self._apply_outputs(handoff, machine.abort(error))

    def _set_machine_ticket(
        self, handoff: _ActiveHandoff, ticket: Ticket, lock: WriterLock
    ) -> None:
        outputs = handoff.machine.set_ticket(ticket, lock, self._clock())
        if handoff.machine.ticket is not None:  # the machine has taken it
            self._keys_by_ticket[ticket.id] = handoff.machine.key
        self._apply_outputs(handoff, outputs)

    def apply_input(self, key: AttemptKey, call: HandoffInput) -> None:
        """Pass an input to the machine of `key`, if there is one."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            self.counters["ignored_unknown"] += 1
            return
        self._apply_outputs(handoff, call(handoff.machine))

    def add_layer_waiter(self, key: AttemptKey, waiter: LayerWaiter) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            waiter.done.set()
            return
        handoff.waiters.append(waiter)
        self._wake_waiters(handoff)

    def on_peer_gone(self, decode: Incarnation) -> None:
        error = PeerUnreachable(f"decode node {decode} is gone")
        for handoff in list(self._handoffs.values()):
            if handoff.peer_key is not None and handoff.peer_key[1] == decode:
                self._apply_outputs(handoff, handoff.machine.abort(error))
        for peer, _ in self._links.items():
            if peer[1] == decode:
                self._links.close_link(peer)
        self._writers.unmap_peer(decode)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._abort_all(StaleMessage("this node has rejoined with a new incarnation"))

    def _abort_all(self, error: BatonError) -> None:
        for handoff in list(self._handoffs.values()):
            self._apply_outputs(handoff, handoff.machine.abort(error))

    # PlaneLoop

    def poll_once(self) -> None:
        self._has_more_work = False
        for peer, link in self._links.items():
            self._receive(link)
            link.flush()
            if (loss := link.get_loss()) is not None:
                self._drop_link(peer, loss)
        for handoff in list(self._handoffs.values()):
            self._tick(handoff, self._clock())
        for _ in range(_WRITES_PER_TURN):
            if not any([self._write_next(handoff) for handoff in list(self._handoffs.values())]):
                break
        else:
            self._has_more_work = True
        self._writers.pass_on_ends()

    def next_deadline(self) -> float:
        if self._has_more_work:
            return self._clock()
        return min((handoff.machine.deadline for handoff in self._handoffs.values()), default=NEVER)

    def pollables(self) -> Sequence[tuple[Pollable, bool]]:
        return self._links.pollables()

    def begin_close(self) -> None:
        self._abort_all(HandoffFailed("the transfer plane is closing"))

    def is_drained(self) -> bool:
        return self._writers.is_idle and self._links.has_no_unacked_aborts()

    def close(self) -> None:
        self._links.close()
        self._writers.close()

    # links

    def _close_stale_links(self, peer: PeerKey) -> None:
        """Close links to earlier incarnations of a peer's endpoint, unless they are in use.

        An endpoint has one incarnation at a time. The end of an earlier one may never be reported:
        a coordinator that was restarted does not know it."""
        in_use = {handoff.peer_key for handoff in self._handoffs.values()}
        for other, link in self._links.items():
            if other[0] == peer[0] and other not in in_use and not link.unacked_aborts:
                self._links.close_link(other)

    def _receive(self, link: PeerLink) -> None:
        for _ in range(_FRAMES_PER_TURN):
            try:
                frame = link.receive(self._clock())
            except frames.BadFrame:
                self.counters["bad_frames"] += 1
                continue
            if frame is None:
                return
            self._on_frame(frame)
        self._has_more_work = True

    def _on_frame(self, frame: frames.FrameToWriter) -> None:
        key = self._keys_by_ticket.get(TicketId(frame.ticket_id))
        if key is None:
            self.counters["ignored_unknown"] += 1
            return
        handoff = self._handoffs[key]
        self._apply_outputs(handoff, handoff.machine.on_frame(frame, self._clock()))
        self._end_busy_period(handoff)

    def _end_busy_period(self, handoff: _ActiveHandoff) -> None:
        """Learn what the link takes, once all that could be sent has landed."""
        machine = handoff.machine
        period = handoff.link_usage.take_busy_period(machine.unacked_bytes)
        if period is None or machine.ticket is None:
            return
        estimator = self._link_costs.setdefault(
            machine.ticket.transport, LinkCostEstimator(machine.settings.max_payload_bytes)
        )
        estimator.observe_busy_period(period, machine.progress.last_landed_at)
        self.link_cost = estimator.cost

    def _tick(self, handoff: _ActiveHandoff, now: float) -> None:
        if now < handoff.machine.deadline:
            return
        peer, unanswered = handoff.peer_key, handoff.machine.is_answer_overdue(now)
        self._apply_outputs(handoff, handoff.machine.tick(now))
        link = self._links.get(peer) if unanswered and peer is not None else None
        if (
            link is not None
            and peer is not None
            and now - link.last_heard_at >= self._settings.progress_timeout
        ):
            # The peer may be alive, but this link is dead: the next hand-off dials a new one.
            error = PeerUnreachable(f"transfer link to {peer[0]}: silent (progress_timeout)")
            self._drop_link(peer, LinkLoss(error, was_up=True))

    def _drop_link(self, peer: PeerKey, loss: LinkLoss) -> None:
        self.counters["links_lost"] += 1
        self._links.close_link(peer)
        for handoff in list(self._handoffs.values()):
            if handoff.peer_key == peer:
                self._apply_outputs(handoff, handoff.machine.on_link_lost(loss.error, loss.was_up))
        if not any(  # over another link, perhaps
            handoff.peer_key is not None
            and handoff.peer_key[1] == peer[1]
            and handoff.path is not None
            and not handoff.path.is_inline
            for handoff in self._handoffs.values()
        ):
            self._writers.unmap_peer(peer[1])

    # writing

    def _write_next(self, handoff: _ActiveHandoff) -> bool:
        """Write one message of a hand-off. False if nothing is ready or the link is full."""
        link = self._links.get(handoff.peer_key) if handoff.peer_key is not None else None
        if link is not None and link.is_full:
            return False
        started = self._clock()
        write, outputs = handoff.machine.begin_write(started)
        self._apply_outputs(handoff, outputs)
        if write is None:
            return False
        assert handoff.path is not None
        size = write.slab_range.num_slabs * self._shape.slab_bytes
        num_layers = write.slab_range.num_layers
        handoff.link_usage.add_message(size, write.gate, started, num_layers)
        try:
            action = self._failpoints.hit("transfer.write.before")
        except HandoffFailed as error:
            self._apply_outputs(handoff, handoff.machine.fail_write(error))
            return True
        on_end = partial(self._end_write, handoff, write, action)
        self._writers.start_write(handoff.path, write, action, on_end)
        return True

    def _end_write(
        self,
        handoff: _ActiveHandoff,
        write: OutgoingWrite,
        action: FailpointAction | None,
        result: WrittenSlabs | HandoffFailed,
    ) -> None:
        """The source blocks of a write were read, or could not be."""
        if not isinstance(result, HandoffFailed):
            try:
                self._failpoints.hit("transfer.write.after")
            except HandoffFailed as error:
                result = error
        if isinstance(result, HandoffFailed):
            self._apply_outputs(handoff, handoff.machine.fail_write(result))
            return
        self.counters["messages_written"] += 1
        self.counters["bytes_written"] += write.slab_range.num_slabs * self._shape.slab_bytes
        self.counters["slabs_written"] += write.slab_range.num_slabs
        outputs = handoff.machine.finish_write(
            write, result.checksum, result.payload is not None, self._clock()
        )
        self._apply_outputs(handoff, outputs, result.payload, action)

    # outputs

    def _apply_outputs(
        self,
        handoff: _ActiveHandoff,
        outputs: list[OutboundOutput],
        payload: memoryview | None = None,
        action: FailpointAction | None = None,
    ) -> None:
        for output in outputs:
            match output:
                case IgnoredInput():
                    self.counters[f"ignored_{output.reason}"] += 1
                case frames.WriteFrame():
                    self._send(handoff, output, payload, action)
                case frames.SealFrame():
                    self._send_seal(handoff, output)
                case frames.Frame():
                    self._send(handoff, output)
                case OutboundCommitted() | OutboundAborted():
                    self._finish_handoff(handoff, output)
                case _:
                    assert_never(output)
        self._wake_waiters(handoff)

    def _send_seal(self, handoff: _ActiveHandoff, frame: frames.SealFrame) -> None:
        try:
            action = self._failpoints.hit("transfer.seal.before")
            self._send(handoff, frame, None, action)
            self._failpoints.hit("transfer.seal.after")
        except HandoffFailed as error:
            self._apply_outputs(handoff, handoff.machine.abort(error))

    def _send(
        self,
        handoff: _ActiveHandoff,
        frame: frames.FrameToDecode,
        payload: memoryview | None = None,
        action: FailpointAction | None = None,
    ) -> None:
        if action is FailpointAction.DROP:
            return
        assert handoff.peer_key is not None
        link = self._links.get_or_dial(handoff.peer_key, self._clock())
        if isinstance(frame, frames.AbortFrame):
            link.unacked_aborts.add(TicketId(frame.ticket_id))
        header = frames.encode_frame(frame)
        if action is FailpointAction.CORRUPT and not isinstance(frame, frames.WriteFrame):
            # Of a Write the payload is corrupted instead.
            header = frames.corrupt_header(header)
        for _ in range(2 if action is FailpointAction.DUPLICATE else 1):
            link.send(header, payload)

    def _finish_handoff(
        self, handoff: _ActiveHandoff, event: OutboundCommitted | OutboundAborted
    ) -> None:
        machine = handoff.machine
        del self._handoffs[machine.key]
        if machine.ticket is not None:
            self._keys_by_ticket.pop(machine.ticket.id, None)
        self.counters[
            "committed" if isinstance(event, OutboundCommitted) else f"aborted_{event.error.code}"
        ] += 1
        self._emit(event)

    def _wake_waiters(self, handoff: _ActiveHandoff) -> None:
        handoff.waiters = [
            waiter for waiter in handoff.waiters if not waiter.try_finish(handoff.machine)
        ]
