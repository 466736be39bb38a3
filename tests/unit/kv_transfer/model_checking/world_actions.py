"""The actions that are possible in a state of the world."""

from collections.abc import Iterator

from kv_transfer.core import inbound_handoff, outbound_handoff
from kv_transfer.core.inbound_handoff import InboundState
from kv_transfer.core.outbound_handoff import OutboundState
from tests.unit.kv_transfer.model_checking.scenario import AFTER_EVERY_LEASE, InvariantViolation
from tests.unit.kv_transfer.model_checking.world_state import WorldState


class WorldActions(WorldState):
    """Lists the possible actions, and checks that everything has ended when none is left."""

    __slots__ = ()

    def list_actions(self) -> list[tuple[str, int]]:
        """Every possible action, as its name and the writer or attempt that it concerns.

        Progress and faults; up to `max_endings` aborts, revocations and expired leases; and
        time-outs, once nothing else is left: what can end only by a time-out does end by it."""
        found = [*self._progress(), *self._faults()]
        if self.endings < self.scenario.max_endings:
            found += [*self._voluntary_endings(), *self._leases()]
        return found or [*self._leases(), *self._timeouts()]

    def apply_action(self, name: str, subject: int) -> None:
        getattr(self, f"do_{name}")(subject)

    def _progress(self) -> Iterator[tuple[str, int]]:
        yield from self._writers_progress()
        if "decode" not in self.dead_processes:
            yield from self._decodes_progress()

    def _writers_progress(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.outbound.items():
            if self._is_dead(writer):
                if self.writes_in_flight[writer] is not None:
                    yield "device_stops", writer
                continue
            state = machine.state
            if self.writes_in_flight[writer] is not None:
                yield "finish_write", writer
            if self.frames_to_writer[writer]:
                yield "deliver_to_writer", writer
            if writer in self.cut_links:
                yield "notice_cut", writer
            if state in outbound_handoff.TERMINAL_STATES or state is OutboundState.ABORTING:
                continue
            if self.announced_steps[writer] < len(self._announce_steps()):
                yield "announce", writer
            if state is OutboundState.UNTICKETED and self._attempt(writer) in self.inbound:
                yield "ticket", writer
            if (
                state is OutboundState.STREAMING
                and machine.send_queue
                and self.writes_in_flight[writer] is None
            ):
                yield "begin_write", writer
        if (
            self.scenario.max_attempts > 1
            and 1 not in self.outbound
            and self._first_attempt_failed()
        ):
            yield "place_again", 1

    def _decodes_progress(self) -> Iterator[tuple[str, int]]:
        if 1 in self.outbound and 1 not in self.inbound and self.owning_attempt is None:
            yield "grant", 1
        for writer in self.outbound:
            if self.frames_to_decode[writer]:
                yield "deliver_to_decode", writer
        for attempt, machine in self.inbound.items():
            if attempt in self.expired_attempts and machine.deadline <= AFTER_EVERY_LEASE:
                yield "tick", attempt
            if machine.state in inbound_handoff.AWAITING_FENCE_STATES:
                yield "retry_fence", attempt
            if machine.state is InboundState.SEALED:
                yield "commit", attempt

    def _voluntary_endings(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.outbound.items():
            is_over = (
                machine.state in outbound_handoff.TERMINAL_STATES
                or machine.state is OutboundState.ABORTING
            )
            if not is_over and not self._is_dead(writer):
                yield "abort", writer
        for attempt, inbound_machine in self.inbound.items():
            if (
                inbound_machine.state in inbound_handoff.LIVE_STATES
                and "decode" not in self.dead_processes
            ):
                yield "revoke", attempt

    def _leases(self) -> Iterator[tuple[str, int]]:
        for attempt, machine in self.inbound.items():
            if (
                machine.deadline < AFTER_EVERY_LEASE
                and attempt not in self.expired_attempts
                and "decode" not in self.dead_processes
            ):
                yield "lease_passes", attempt

    def _timeouts(self) -> Iterator[tuple[str, int]]:
        for writer, machine in self.outbound.items():
            if machine.is_answer_overdue(AFTER_EVERY_LEASE) and not self._is_dead(writer):
                yield "give_up_waiting", writer
            elif machine.state is OutboundState.UNTICKETED and not self._is_dead(writer):
                yield "abort", writer  # by its role: work without a ticket has no time-out

    def _faults(self) -> Iterator[tuple[str, int]]:
        if self.faults >= self.scenario.max_faults:
            return
        kinds = self.scenario.fault_kinds
        for writer, machine in self.outbound.items():
            if self._is_dead(writer):
                continue
            ended = machine.state in outbound_handoff.TERMINAL_STATES
            if "crash" in kinds and not ended:
                yield "crash_writer", writer
            if (
                "cut" in kinds
                and not ended
                and machine.ticket is not None
                and "decode" not in self.dead_processes
            ):
                yield "cut_link", writer
            if self.frames_to_decode[writer] and "decode" not in self.dead_processes:
                if "duplicate" in kinds:
                    yield "duplicate", writer
                if "drop" in kinds:
                    yield "drop", writer
            if "corrupt" in kinds and self.writes_in_flight[writer] is not None:
                yield "corrupt", writer
        if "crash" in kinds and "decode" not in self.dead_processes:
            yield "crash_decode", 0

    def check_quiescent(self) -> None:
        """No action is left: every hand-off must have ended, and no blocks may be held."""
        for writer in self.outbound:
            if not self._is_dead(writer) and f"outbound {writer}" not in self.ended_machines:
                raise InvariantViolation(f"writer {writer} never ended")
        if "decode" in self.dead_processes:
            return
        for attempt in self.inbound:
            if f"inbound {attempt}" not in self.ended_machines:
                raise InvariantViolation(f"ticket {attempt} never ended")
        if self.owning_attempt is not None and not self.is_committed:
            raise InvariantViolation(f"blocks are still held by ticket {self.owning_attempt}")
