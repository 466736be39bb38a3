"""Both machines against every interleaving of a small world: two layers, two blocks, two attempts, one crash. And the
same search over machines with a planted bug, which it must find."""

from dataclasses import dataclass, replace

import pytest

from kv_transfer.core import frames, landing
from kv_transfer.core.departure import Departure, DepartureState
from kv_transfer.core.departure import Output as DepartureOutput
from kv_transfer.core.events import Aborted, Fenced, SealInfo
from kv_transfer.core.landing import Landing, LandingState
from tests.unit.transfer.explore import explore
from tests.unit.transfer.setting import ONE_SLAB, SLAB, Setting, Violation

CRASH = frozenset({"crash"})
A_LAYER = replace(ONE_SLAB, max_payload=2 * SLAB)
TWO_ATTEMPTS = Setting(attempts=2, fault_kinds=CRASH, pace=A_LAYER)
ONE_ATTEMPT = Setting(attempts=1)
CALM = Setting(attempts=1, faults=0, endings=0)
GHOST = Setting(attempts=1, layers=1, one_sided=False, ghost=True, faults=0, endings=1)


@pytest.mark.timeout(600)  # a few seconds of one core; more where many share it
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_two_attempts_with_a_crash_at_any_moment(one_sided: bool) -> None:
    assert explore(replace(TWO_ATTEMPTS, one_sided=one_sided)) > 20_000


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_one_attempt_slab_by_slab_with_any_fault_at_any_moment(one_sided: bool) -> None:
    assert explore(replace(ONE_ATTEMPT, one_sided=one_sided)) > 5_000


def test_acknowledgements_that_take_their_time() -> None:
    assert explore(replace(ONE_ATTEMPT, slow_acks=True, pace=A_LAYER, endings=1)) > 1_000


def test_a_life_that_should_be_dead_writes_along() -> None:
    assert explore(GHOST) > 1_000


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_a_prefix_that_decode_holds_in_two_chunks(one_sided: bool) -> None:
    setting = replace(ONE_ATTEMPT, layers=1, held=1, chunks=(2, 1), one_sided=one_sided)
    assert explore(setting) > 1_000


# planted bugs


class CommitsOneBlockEarly(Landing):
    def landed(self, frame: frames.Write, checksum_right: bool, now: float) -> list[landing.Output]:
        outputs = super().landed(frame, checksum_right, now)
        if self.state is LandingState.WRITING and self.arrived.bit_count() == self.grid.slabs - 1:
            self.seal_info = SealInfo(())
            outputs += self._try_to_seal()
        return outputs


class FreesWithoutAcknowledgement(Departure):
    def _end_if_idle(self) -> list[DepartureOutput]:
        if self.state is not DepartureState.ABORTING:
            return []
        self.state = DepartureState.ABORTED
        assert self.error is not None
        return [Aborted(self.key, self.error)]


class AcceptsAStaleIncarnation(Landing):
    def is_ours(self, frame: frames.Frame) -> bool:
        return frame.attempt == self.ticket.key.attempt


class HonoursAnExpiredTicket(Landing):
    def _expired(self, now: float) -> bool:
        return False


class CountsADuplicate(Landing):
    def admit(self, frame: frames.Write, now: float) -> tuple[bool, list[landing.Output]]:
        held, self.arrived = self.arrived, 0
        admitted = super().admit(frame, now)
        self.arrived = held
        return admitted


class ReleasesAQuarantineByMessage(Landing):
    def _refuse(self, frame: frames.Frame) -> list[landing.Output]:
        if self.state is LandingState.QUARANTINED:
            self.state = LandingState.LOST
            return [Fenced(self.ticket.id)]
        return super()._refuse(frame)


class SealsUnfenced(Landing):
    def _try_to_seal(self) -> list[landing.Output]:
        held, self.fence = self.fence, lambda: True
        outputs = super()._try_to_seal()
        self.fence = held
        return outputs


class SealsUnderItsLock(Departure):
    def _write_ended(self) -> None:
        self.writes -= 1


@dataclass(frozen=True)
class Planted:
    setting: Setting
    caught_as: str


PLANTED = [
    Planted(replace(CALM, one_sided=False, landing=CommitsOneBlockEarly), "is sealed over"),
    Planted(replace(CALM, endings=1, departure=FreesWithoutAcknowledgement), "under a read"),
    Planted(replace(GHOST, landing=AcceptsAStaleIncarnation), "ticket 0 is sealed over"),
    Planted(replace(CALM, endings=1, landing=HonoursAnExpiredTicket), "expired"),
    Planted(replace(ONE_ATTEMPT, one_sided=False, landing=CountsADuplicate), "counted twice"),
    Planted(replace(CALM, endings=1, landing=ReleasesAQuarantineByMessage), "wrote blocks of"),
    Planted(replace(CALM, landing=SealsUnfenced), "sealed without the fence"),
    Planted(replace(CALM, departure=SealsUnderItsLock), "sealed under a lock"),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: _name(planted))
def test_the_search_finds_a_planted_bug(planted: Planted) -> None:
    with pytest.raises(Violation, match=planted.caught_as):
        explore(planted.setting)


def _name(planted: Planted) -> str:
    chosen = (planted.setting.landing, planted.setting.departure)
    return next(kind.__name__ for kind in chosen if kind not in (Landing, Departure))
