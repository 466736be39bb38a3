"""What can happen next in a world."""

from collections.abc import Iterator

from kv_transfer.core import departure, landing
from kv_transfer.core.departure import DepartureState
from kv_transfer.core.landing import LandingState
from tests.unit.transfer.setting import LATE, Violation
from tests.unit.transfer.state import State


class Possible(State):
    __slots__ = ()

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
