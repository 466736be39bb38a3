"""A small world around the two state machines: writers, decode's blocks, fence bytes, ordered links
and crashes.

Every moment at which something else could happen in the real system is an action of its own, so a
search over actions is a search over interleavings. Invariants are checked at each action; a broken
one raises InvariantViolation.

Contents are modelled by tags: the tag (writer, layer, block) in a slab means that the slab holds
this writer's KV of that layer and logical block.
"""

from dataclasses import replace
from typing import Self

from baton.errors import Cancelled, PeerUnreachable
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
from kv_transfer.core import events, frames, inbound_handoff, outbound_handoff
from kv_transfer.core.handoff_common import ArenaShape, IgnoredInput
from kv_transfer.core.inbound_handoff import InboundHandoff
from kv_transfer.core.send_queue import ReadySlabs
from kv_transfer.core.writer_lock import NoLock
from tests.unit.kv_transfer.model_checking.scenario import (
    AFTER_EVERY_LEASE,
    DECODE_INCARNATION,
    EMPTY_SLAB,
    GHOST_WRITER,
    SLAB_BYTES,
    TORN_SLAB,
    FrameInFlight,
    InvariantViolation,
    Scenario,
    SlabTag,
)
from tests.unit.kv_transfer.model_checking.world_faults import WorldFaults
from tests.unit.kv_transfer.model_checking.world_state import (
    ModelWriterLock,
    checksum,
    inbound_state_key,
    intern_state,
    outbound_state_key,
)


class HandoffWorld(WorldFaults):
    """The world, with a method `do_NAME` for each action NAME."""

    __slots__ = ()

    @classmethod
    def create(cls, scenario: Scenario) -> Self:
        slabs = scenario.num_layers * scenario.num_blocks
        world = cls(scenario, arena=(EMPTY_SLAB,) * slabs, times_landed=(0,) * slabs)
        world._open(0)
        if scenario.has_ghost_writer:
            world._open(GHOST_WRITER)
        world._grant(0)
        return world

    def _open(self, writer: int) -> None:
        scenario = self.scenario
        attempt = self._attempt(writer)
        self.outbound[writer] = scenario.outbound_class(
            key=AttemptKey(RequestId("r"), attempt, 0),
            writer_incarnation=Incarnation(f"writer {writer}"),
            shape=ArenaShape(scenario.num_layers, 1, SLAB_BYTES),
            num_blocks=scenario.blocks_held_by_decode + scenario.num_blocks,
            settings=scenario.send_settings,
        )
        self.machine_state_ids[f"outbound {writer}"] = -1
        self.announced_steps[writer] = 0
        self.frames_to_decode[writer] = ()
        self.frames_to_writer[writer] = ()
        self.writes_in_flight[writer] = None
        if attempt > 0:
            # Interleaving the second attempt's layers too would find nothing new.
            for _ in self._announce_steps():
                self.do_announce(writer)

    def _grant(self, attempt: int) -> None:
        scenario = self.scenario
        if self.owning_attempt is not None:
            raise InvariantViolation("blocks were granted twice")
        self.owning_attempt = attempt
        ticket = Ticket(
            id=TicketId(f"{attempt:032x}"),
            key=AttemptKey(RequestId("r"), attempt, 0),
            decode_peer=PeerAddress(NodeName("d"), DECODE_INCARNATION, "h", "e"),
            writer_incarnation=Incarnation(f"writer {attempt}"),
            first_block=scenario.blocks_held_by_decode,
            block_offsets=tuple(range(scenario.num_blocks)),
            num_tokens=scenario.blocks_held_by_decode + scenario.num_blocks,
            ttl_seconds=1.0,
            transport="shm" if scenario.is_one_sided else "zmq",
            segment=SegmentRef("s", DECODE_INCARNATION),
            fence_byte=attempt,
        )
        shape = ArenaShape(scenario.num_layers, 1, SLAB_BYTES)
        self.machine_state_ids[f"inbound {attempt}"] = -1
        self.inbound[attempt] = scenario.inbound_class(
            ticket, shape, self._fence(attempt), 1 << 20, 1.0, 1.0
        )

    # writers

    def do_announce(self, writer: int) -> None:
        layer, first, count = self._announce_steps()[self.announced_steps[writer]]
        self.announced_steps[writer] += 1
        source = tuple(BlockIndex(10 * (writer + 2) + first + n) for n in range(count))
        machine = self._own_outbound(writer)
        self._apply_outbound_outputs(
            writer, machine.announce_slabs(ReadySlabs(layer, first, source), 0.0)
        )
        if self.announced_steps[writer] == len(self._announce_steps()):
            self._apply_outbound_outputs(writer, machine.seal(events.SealInfo((writer + 1,)), 0.0))

    def do_ticket(self, writer: int) -> None:
        ticket = self.inbound[self._attempt(writer)].ticket
        if writer == GHOST_WRITER:
            ticket = replace(ticket, writer_incarnation=self.outbound[writer].writer_incarnation)
        lock = ModelWriterLock(self, writer) if self.scenario.is_one_sided else NoLock()
        self._apply_outbound_outputs(
            writer, self._own_outbound(writer).set_ticket(ticket, lock, 0.0)
        )

    def do_begin_write(self, writer: int) -> None:
        write, outputs = self._own_outbound(writer).begin_write(0.0)
        self._apply_outbound_outputs(writer, outputs)
        self.writes_in_flight[writer] = write

    def do_finish_write(self, writer: int, is_damaged: bool = False) -> None:
        """The bytes were read and, if one-sided, written since the write began."""
        write = self.writes_in_flight[writer]
        assert write is not None
        self.writes_in_flight[writer] = None
        if f"outbound {writer}" in self.ended_machines:
            raise InvariantViolation("source blocks were released under a read")
        content = self._expected_tags(writer, write.slab_range)
        landed = (TORN_SLAB,) * len(content) if is_damaged else content
        if self.scenario.is_one_sided:
            self._write_tags(writer, write.slab_range, landed)
        outputs = self._own_outbound(writer).finish_write(
            write, checksum(content), not self.scenario.is_one_sided, 0.0
        )
        self._apply_outbound_outputs(
            writer, outputs, None if self.scenario.is_one_sided else landed
        )

    def do_abort(self, writer: int) -> None:
        self.endings += 1
        self._apply_outbound_outputs(writer, self._own_outbound(writer).abort(Cancelled("role")))

    def do_give_up_waiting(self, writer: int) -> None:
        self.endings += 1
        self._apply_outbound_outputs(
            writer, self._own_outbound(writer).tick(AFTER_EVERY_LEASE), renewals=False
        )

    def do_deliver_to_writer(self, writer: int) -> None:
        frame, *rest = self.frames_to_writer[writer]
        self.frames_to_writer[writer] = tuple(rest)
        self._deliver_frame_to_writer(writer, frame)

    def _deliver_frame_to_writer(self, writer: int, frame: frames.FrameToWriter) -> None:
        self._apply_outbound_outputs(writer, self._own_outbound(writer).on_frame(frame, 0.0))

    def do_notice_cut(self, writer: int) -> None:
        self.cut_links -= {writer}
        was_up = "decode" not in self.dead_processes
        self._apply_outbound_outputs(
            writer, self._own_outbound(writer).on_link_lost(PeerUnreachable("link"), was_up)
        )

    def do_place_again(self, writer: int) -> None:
        self._open(writer)

    # decode

    def do_grant(self, attempt: int) -> None:
        self._grant(attempt)

    def do_deliver_to_decode(self, writer: int) -> None:
        sent, *rest = self.frames_to_decode[writer]
        self.frames_to_decode[writer] = tuple(rest)
        self._deliver_frame_to_decode(writer, sent)

    def do_lease_passes(self, attempt: int) -> None:
        self.endings += 1
        self.expired_attempts |= {attempt}

    def do_tick(self, attempt: int) -> None:
        self._apply_inbound_outputs(attempt, self._own_inbound(attempt).tick(AFTER_EVERY_LEASE))

    def do_retry_fence(self, attempt: int) -> None:
        self._apply_inbound_outputs(attempt, self._own_inbound(attempt).tick(0.0))

    def do_commit(self, attempt: int) -> None:
        if self.owning_attempt != attempt:
            raise InvariantViolation(f"ticket {attempt} commits blocks of {self.owning_attempt}")
        self._check_arena_contents(attempt)
        self.is_committed = True
        self.ended_machines |= {f"inbound {attempt}"}
        self._apply_inbound_outputs(attempt, self._own_inbound(attempt).commit())

    def do_revoke(self, attempt: int) -> None:
        self.endings += 1
        self._apply_inbound_outputs(attempt, self._own_inbound(attempt).revoke(Cancelled("role")))

    # faults

    def do_duplicate(self, writer: int) -> None:
        """Deliver a frame, and leave it on its way."""
        self.faults += 1
        self._deliver_frame_to_decode(writer, self.frames_to_decode[writer][0])

    def do_corrupt(self, writer: int) -> None:
        """Finish a write whose bytes change on their way."""
        self.faults += 1
        self.do_finish_write(writer, is_damaged=True)

    # outputs of the machines

    def _deliver_frame_to_decode(self, writer: int, sent: FrameInFlight) -> None:
        frame = sent.frame
        attempt = int(frame.ticket_id, 16)
        machine = self._own_inbound(attempt)
        now = AFTER_EVERY_LEASE if attempt in self.expired_attempts else 0.0
        match frame:
            case frames.OpenFrame():
                outputs = machine.on_open(frame, now)
            case frames.WriteFrame():
                outputs = self._deliver_write(machine, frame, sent, now)
            case frames.SealFrame():
                outputs = machine.on_seal(frame, now)
            case frames.AbortFrame():
                outputs = machine.on_abort(frame)
            case frames.RenewFrame():
                outputs = machine.on_renew(frame, now)
        self._apply_inbound_outputs(attempt, outputs, reply_to=writer)

    def _deliver_write(
        self, machine: InboundHandoff, frame: frames.WriteFrame, sent: FrameInFlight, now: float
    ) -> list[inbound_handoff.InboundOutput]:
        is_accepted, outputs = machine.check_write(frame, now)
        if not is_accepted:
            return outputs
        if now == AFTER_EVERY_LEASE:
            raise InvariantViolation("a slab landed under an expired ticket")
        content = sent.content
        if content is None:
            content = tuple(self.arena[place] for place in self._arena_positions(frame.slab_range))
        is_right = checksum(content) == frame.checksum
        if is_right and sent.content is not None:
            self._write_tags(int(machine.ticket.id, 16), frame.slab_range, content)
        if is_right:
            times = list(self.times_landed)
            for place in self._arena_positions(frame.slab_range):
                times[place] += 1
                if times[place] > 1:
                    raise InvariantViolation("a slab was counted twice")
            self.times_landed = tuple(times)
        return machine.finish_write(frame, is_right, now)

    def _apply_outbound_outputs(
        self,
        writer: int,
        outputs: list[outbound_handoff.OutboundOutput],
        content: tuple[SlabTag, ...] | None = None,
        renewals: bool = True,
    ) -> None:
        machine = self.outbound[writer]
        is_over = machine.state in outbound_handoff.TERMINAL_STATES
        self.machine_state_ids[f"outbound {writer}"] = intern_state(
            machine.state if is_over else outbound_state_key(machine)
        )
        for output in outputs:
            match output:
                case events.OutboundCommitted() | events.OutboundAborted():
                    self._mark_ended(f"outbound {writer}")
                    if self.writes_in_flight[writer] is not None:
                        raise InvariantViolation("an end was reported under a read")
                    if any(owner == f"writer {writer}" for _, owner in self.locks):
                        raise InvariantViolation("an end was reported under a lock")
                case frames.Frame():
                    if isinstance(output, frames.SealFrame) and any(
                        owner == f"writer {writer}" for _, owner in self.locks
                    ):
                        raise InvariantViolation("sealed under a lock")
                    renewal = isinstance(output, frames.RenewFrame)
                    if (
                        "decode" not in self.dead_processes
                        and writer not in self.cut_links
                        and not (renewal and not renewals)
                    ):
                        sent = FrameInFlight(
                            output, content if isinstance(output, frames.WriteFrame) else None
                        )
                        if self._ticket_is_over(writer) and not self.frames_to_decode[writer]:
                            # When it arrives makes no difference any more.
                            self._deliver_frame_to_decode(writer, sent)
                        else:
                            self.frames_to_decode[writer] += (sent,)
                case IgnoredInput():
                    pass
        if is_over:
            self.announced_steps[writer] = len(self._announce_steps())
            self.frames_to_writer[writer] = ()

    def _apply_inbound_outputs(
        self,
        attempt: int,
        outputs: list[inbound_handoff.InboundOutput],
        reply_to: int | None = None,
    ) -> None:
        machine = self.inbound[attempt]
        is_over = machine.state in inbound_handoff.TERMINAL_STATES
        self.machine_state_ids[f"inbound {attempt}"] = intern_state(
            machine.state if is_over else inbound_state_key(machine)
        )
        for output in outputs:
            match output:
                case events.InboundSealed():
                    if self.scenario.is_one_sided and (attempt, "decode") not in self.locks:
                        raise InvariantViolation("sealed without the fence")
                    self._check_arena_contents(attempt)
                case events.InboundLost():
                    self._release_blocks(attempt, output.is_fenced)
                case events.InboundFenced():
                    self._release_blocks(attempt, True)
                case frames.Frame():
                    to = attempt if reply_to is None else reply_to
                    if (
                        self._is_dead(to)
                        or to in self.cut_links
                        or self.outbound[to].state in outbound_handoff.TERMINAL_STATES
                    ):
                        continue
                    if (
                        isinstance(output, frames.RefusedFrame)
                        and output in self.frames_to_writer[to]
                    ):
                        continue
                    if (
                        isinstance(output, frames.LandedFrame | frames.CreditFrame)
                        and not self.scenario.has_slow_acks
                    ):
                        self._deliver_frame_to_writer(to, output)
                    else:
                        self.frames_to_writer[to] += (output,)
                case IgnoredInput() | events.InboundStarted():
                    pass
        if is_over:
            self.expired_attempts -= {attempt}
