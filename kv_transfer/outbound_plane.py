"""Prefill's side of the transfer plane: one thread, one link per decode node, one machine (core/departure.py)
per hand-off."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from baton.clock import Clock, steady
from baton.errors import BatonError, HandoffFailed, PeerGone, Stale
from baton.failpoints import FAILPOINTS, Action, Failpoints
from baton.kv_layout import KVLayout
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket, TicketId
from kv_transfer.core import departure, frames
from kv_transfer.core.departure import Announced, Departure, NoLock, Pace
from kv_transfer.core.events import Aborted, Committed, LayerLanded, OutboundEvent, SealInfo
from kv_transfer.core.landing import NEVER, ArenaShape, Ignored
from kv_transfer.inbound_plane import flipped
from kv_transfer.outbound_handoff import Handoff, Peer, Waiter
from kv_transfer.peer_arena import PeerArenas, TicketLock
from kv_transfer.peer_link import PeerLink
from kv_transfer.plane_thread import PlaneThread, end_process
from kv_transfer.settings import TransferSettings
from kv_transfer.slab_rows import SlabRows
from kv_transfer.transport import Dialer, Loss, Pollable

_ROUNDS = 4  # messages written per hand-off before links and commands get their turn again
_BATCH = 64  # frames handled per link before writing gets its turn again


class OutboundTransfer:
    """Implements plane.OutboundPlane. Everything below `close` runs on the plane's thread."""

    def __init__(
        self,
        *,
        arena: memoryview,
        layout: KVLayout,
        incarnation: Incarnation,
        dialers: Mapping[str, Dialer],
        host_id: str,
        settings: TransferSettings,
        emit: Callable[[OutboundEvent], None],
        clock: Clock = steady,
        failpoints: Failpoints = FAILPOINTS,
        on_defect: Callable[[], None] = end_process,
    ) -> None:
        """`dialers` by the scheme of the endpoints that they dial."""
        self._slabs = SlabRows(arena, layout)
        self._layout = layout
        self._shape = ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes)
        self._incarnation = incarnation
        self._dialers = dialers
        self._host_id = host_id
        self._settings = settings
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
        self._handoffs: dict[AttemptKey, Handoff] = {}
        self._tickets: dict[TicketId, AttemptKey] = {}
        self._links: dict[Peer, PeerLink] = {}
        self._arenas = PeerArenas(settings.segment_folder, layout)
        self._counters: Counter[str] = Counter()
        self._more = False
        self._thread = PlaneThread("transfer-outbound", self, clock, settings.close_timeout, on_defect)
        self._thread.start()

    # called by the node, on any thread

    @property
    def endpoint(self) -> str:
        """Empty: a writer dials and is never dialled."""
        return ""

    def rejoin(self, incarnation: Incarnation) -> None:
        self._thread.post(lambda: self._rejoin(incarnation))

    def open(self, key: AttemptKey, num_tokens: int) -> None:
        if not self._thread.post(lambda: self._open(key, num_tokens)):
            self._emit(Aborted(key, HandoffFailed("the transfer plane is closed")))

    def ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self._thread.post(lambda: self._ticket(key, ticket))

    def layer_ready(self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]) -> None:
        """Raises ValueError for blocks that the arena does not have."""
        ready, now = Announced(layer, first, tuple(source)), self._clock()
        if ready.source and not 0 <= min(ready.source) <= max(ready.source) < self._slabs.num_blocks:
            raise ValueError(f"{key} announces blocks that an arena of {self._slabs.num_blocks} does not have")
        self._thread.post(lambda: self._on(key, lambda machine: machine.announce(ready, now)))

    def seal(self, key: AttemptKey, info: SealInfo) -> None:
        self._thread.post(lambda: self._on(key, lambda machine: machine.seal(info, self._clock())))

    def abort(self, key: AttemptKey, error: BatonError) -> None:
        self._thread.post(lambda: self._on(key, lambda machine: machine.abort(error)))

    def peer_gone(self, decode: Incarnation) -> None:
        self._thread.post(lambda: self._peer_gone(decode))

    def wait_landed(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        waiter = Waiter(layer)
        if not self._thread.post(lambda: self._wait(key, waiter)):
            return False
        waiter.done.wait(timeout)
        return waiter.landed

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def close(self) -> None:
        self._thread.close()

    # commands

    def _open(self, key: AttemptKey, num_tokens: int) -> None:
        if key in self._handoffs:
            self._counters["ignored_open"] += 1
            return
        blocks = self._layout.blocks_for(num_tokens)
        machine = Departure(key, self._incarnation, self._shape, blocks, self._pace, self._host_id)
        self._handoffs[key] = Handoff(machine)
        self._counters["opened"] += 1

    def _ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.peer is not None:
            self._counters["ignored_ticket"] += 1
            return
        endpoint = ticket.decode.transfer_endpoint
        if endpoint.partition("://")[0] not in self._dialers:
            self._carry_out(handoff, handoff.machine.abort(PeerGone(f"no transport dials {endpoint[:200]!r}")))
            return
        handoff.peer = (endpoint, ticket.decode.incarnation)
        self._tickets[ticket.id] = key
        lock: departure.WriterLock = NoLock()
        unmappable: HandoffFailed | None = None
        try:
            lock = self._lock_of(handoff, ticket)
        except HandoffFailed as error:
            unmappable = error
        self._carry_out(handoff, handoff.machine.grant(ticket, lock, self._clock()))
        if unmappable is not None:
            self._carry_out(handoff, handoff.machine.abort(unmappable))

    def _lock_of(self, handoff: Handoff, ticket: Ticket) -> departure.WriterLock:
        if ticket.transport != "shm":
            return NoLock()
        handoff.arena = self._arenas.get(ticket)
        return TicketLock(handoff.arena, ticket)

    def _on(self, key: AttemptKey, call: Callable[[Departure], list[departure.Output]]) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._counters["ignored_unknown"] += 1
            return
        self._carry_out(handoff, call(handoff.machine))

    def _wait(self, key: AttemptKey, waiter: Waiter) -> None:
        handoff = self._handoffs.get(key)
        if handoff is None:
            waiter.done.set()
            return
        handoff.waiters.append(waiter)
        handoff.wake_waiters()

    def _peer_gone(self, decode: Incarnation) -> None:
        error = PeerGone(f"decode node {decode} is gone")
        for handoff in list(self._handoffs.values()):
            if handoff.peer is not None and handoff.peer[1] == decode:
                self._carry_out(handoff, handoff.machine.abort(error))
        for peer in [peer for peer in self._links if peer[1] == decode]:
            self._links.pop(peer).close()
        self._arenas.drop(decode)

    def _rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._abort_all(Stale("this node has joined anew"))

    def _abort_all(self, error: BatonError) -> None:
        for handoff in list(self._handoffs.values()):
            self._carry_out(handoff, handoff.machine.abort(error))

    # the thread's turn

    def turn(self) -> None:
        self._more = False
        for peer, link in list(self._links.items()):
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
        return [watched for link in self._links.values() for watched in link.watched()]

    def say_goodbye(self) -> None:
        self._abort_all(HandoffFailed("the transfer plane is closing"))

    def heard_out(self) -> bool:
        return not any(link.unacknowledged for link in self._links.values())

    def shut(self) -> None:
        for link in self._links.values():
            link.close()
        for dialer in self._dialers.values():
            dialer.close()
        self._arenas.close()

    # links

    def _link_to(self, peer: Peer) -> PeerLink:
        if peer not in self._links:
            endpoint = peer[0]
            dialer = self._dialers.get(endpoint.partition("://")[0])
            if dialer is None:
                raise PeerGone(f"no transport dials {endpoint[:200]!r}")
            self._links[peer] = PeerLink(dialer.dial(endpoint), self._clock())
        return self._links[peer]

    def _receive(self, link: PeerLink) -> None:
        for _ in range(_BATCH):
            try:
                frame = link.receive(self._clock())
            except frames.BadFrame:
                self._counters["bad_frames"] += 1
                continue
            if frame is None:
                return
            self._on_frame(frame)
        self._more = True

    def _tick(self, handoff: Handoff, now: float) -> None:
        if now < handoff.machine.deadline:
            return
        peer, unanswered = handoff.peer, handoff.machine.unanswered(now)
        self._carry_out(handoff, handoff.machine.tick(now))
        link = self._links.get(peer) if unanswered and peer is not None else None
        if link is not None and peer is not None and now - link.heard >= self._settings.progress_timeout:
            # The peer may live, but this link leads nowhere: the next hand-off dials anew.
            self._lose(peer, Loss(PeerGone(f"transfer link to {peer[0]}: silent (progress_timeout)"), was_up=True))

    def _lose(self, peer: Peer, loss: Loss) -> None:
        self._counters["links_lost"] += 1
        self._links.pop(peer).close()
        for handoff in list(self._handoffs.values()):
            if handoff.peer == peer:
                self._carry_out(handoff, handoff.machine.link_lost(loss.error, loss.was_up))
        if not any(handoff.arena and handoff.peer == peer for handoff in self._handoffs.values()):
            self._arenas.drop(peer[1])

    def _on_frame(self, frame: frames.ToWriter) -> None:
        key = self._tickets.get(TicketId(frame.ticket))
        if key is None:
            self._counters["ignored_unknown"] += 1
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

    # writing

    def _write_next(self, handoff: Handoff) -> bool:
        """Write one message's worth of what is ready, if anything; the next hand-off then has its turn."""
        if handoff.peer is None or (handoff.peer in self._links and self._links[handoff.peer].full):
            return False
        outgoing, outputs = handoff.machine.next_write()
        self._carry_out(handoff, outputs)
        if outgoing is None:
            return False
        try:
            action = self._failpoints.hit("transfer.write.before")
            payload, checksum = handoff.move(self._slabs, outgoing, corrupt=action is Action.CORRUPT)
            self._failpoints.hit("transfer.write.after")
        except HandoffFailed as error:
            self._carry_out(handoff, handoff.machine.write_failed(error))
            return True
        self._counters["bytes_written"] += len(payload)
        self._counters["slabs_written"] += outgoing.area.slabs
        inline = handoff.arena is None
        outputs = handoff.machine.written(outgoing, checksum, inline, self._clock())
        self._carry_out(handoff, outputs, payload if inline else None, action)
        return True

    # outputs

    def _carry_out(
        self,
        handoff: Handoff,
        outputs: list[departure.Output],
        payload: memoryview | None = None,
        action: Action | None = None,
    ) -> None:
        for output in outputs:
            match output:
                case Ignored():
                    self._counters[f"ignored_{output.reason}"] += 1
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
        handoff.wake_waiters()

    def _send_seal(self, handoff: Handoff, frame: frames.Seal) -> None:
        try:
            action = self._failpoints.hit("transfer.seal.before")
            self._send(handoff, frame, None, action)
            self._failpoints.hit("transfer.seal.after")
        except HandoffFailed as error:
            self._carry_out(handoff, handoff.machine.abort(error))

    def _send(
        self,
        handoff: Handoff,
        frame: frames.ToDecode,
        payload: memoryview | None = None,
        action: Action | None = None,
    ) -> None:
        if action is Action.DROP:
            return
        assert handoff.peer is not None
        link = self._link_to(handoff.peer)
        if isinstance(frame, frames.Abort):
            link.unacknowledged.add(TicketId(frame.ticket))
        header = frames.encode(frame)
        if action is Action.CORRUPT and not isinstance(frame, frames.Write):  # a Write's payload was corrupted
            header = bytes(flipped(memoryview(header)))
        for _ in range(2 if action is Action.DUPLICATE else 1):
            link.send(header, payload)

    def _end(self, handoff: Handoff, event: Committed | Aborted) -> None:
        machine = handoff.machine
        del self._handoffs[machine.key]
        if machine.ticket is not None:
            self._tickets.pop(machine.ticket.id, None)
        self._counters["committed" if isinstance(event, Committed) else f"aborted_{event.error.code}"] += 1
        self._emit(event)
