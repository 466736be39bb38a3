"""Both hand-off machines in every interleaving of a small world: two attempts and one crash.

The same search over machines with a planted bug must find the bug.
"""

from dataclasses import dataclass, replace

import pytest

from kv_transfer.core import frames
from kv_transfer.core.events import InboundFenced, OutboundAborted, SealInfo
from kv_transfer.core.inbound_handoff import InboundHandoff, InboundOutput, InboundState
from kv_transfer.core.outbound_handoff import OutboundHandoff, OutboundOutput, OutboundState
from tests.unit.kv_transfer.model_checking.explorer import explore_all_states
from tests.unit.kv_transfer.model_checking.scenario import (
    ONE_SLAB_PER_MESSAGE,
    SLAB_BYTES,
    InvariantViolation,
    Scenario,
)

CRASHES_ONLY = frozenset({"crash"})
ONE_LAYER_PER_MESSAGE = replace(ONE_SLAB_PER_MESSAGE, max_payload_bytes=2 * SLAB_BYTES)
TWO_ATTEMPTS = Scenario(
    max_attempts=2, fault_kinds=CRASHES_ONLY, send_settings=ONE_LAYER_PER_MESSAGE
)
ONE_ATTEMPT = Scenario(max_attempts=1)
NO_FAULTS = Scenario(max_attempts=1, max_faults=0, max_endings=0)
GHOST_SCENARIO = Scenario(
    max_attempts=1,
    num_layers=1,
    is_one_sided=False,
    has_ghost_writer=True,
    max_faults=0,
    max_endings=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_two_attempts_with_a_crash_at_any_moment(one_sided: bool) -> None:
    assert explore_all_states(replace(TWO_ATTEMPTS, is_one_sided=one_sided)) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_one_attempt_slab_by_slab_with_any_fault_at_any_moment(one_sided: bool) -> None:
    assert explore_all_states(replace(ONE_ATTEMPT, is_one_sided=one_sided)) > 5_000


@pytest.mark.slow
def test_two_attempts_with_devices_that_outlive_a_crash() -> None:
    """The kernel drops the locks of a crashed writer, and its device writes on for a while."""
    assert explore_all_states(replace(TWO_ATTEMPTS, has_devices=True)) > 20_000


def test_delayed_acknowledgements() -> None:
    assert (
        explore_all_states(
            replace(
                ONE_ATTEMPT, has_slow_acks=True, send_settings=ONE_LAYER_PER_MESSAGE, max_endings=1
            )
        )
        > 1_000
    )


def test_writes_of_a_stale_incarnation() -> None:
    assert explore_all_states(GHOST_SCENARIO) > 1_000


@pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
def test_prefix_held_by_decode_in_two_chunks(one_sided: bool) -> None:
    scenario = replace(
        ONE_ATTEMPT,
        num_layers=1,
        blocks_held_by_decode=1,
        blocks_per_chunk=(2, 1),
        is_one_sided=one_sided,
    )
    assert explore_all_states(scenario) > 1_000


# planted bugs


class CommitsOneBlockEarly(InboundHandoff):
    def finish_write(
        self, frame: frames.WriteFrame, is_checksum_right: bool, now: float
    ) -> list[InboundOutput]:
        outputs = super().finish_write(frame, is_checksum_right, now)
        if (
            self.state is InboundState.WRITING
            and self.landed_slabs.bit_count() == self.grid.num_slabs - 1
        ):
            self.seal_info = SealInfo(())
            outputs += self._seal_if_fenced()
        return outputs


class FreesWithoutAcknowledgement(OutboundHandoff):
    def _finish_abort_if_idle(self) -> list[OutboundOutput]:
        if self.state is not OutboundState.ABORTING:
            return []
        self.state = OutboundState.ABORTED
        assert self.error is not None
        return [OutboundAborted(self.key, self.error)]


class AcceptsAStaleIncarnation(InboundHandoff):
    def is_current_frame(self, frame: frames.Frame) -> bool:
        return frame.attempt == self.ticket.key.attempt_number


class HonoursAnExpiredTicket(InboundHandoff):
    def _is_expired(self, now: float) -> bool:
        return False


class CountsADuplicate(InboundHandoff):
    def check_write(self, frame: frames.WriteFrame, now: float) -> tuple[bool, list[InboundOutput]]:
        landed, self.landed_slabs = self.landed_slabs, 0
        result = super().check_write(frame, now)
        self.landed_slabs = landed
        return result


class ReleasesAQuarantineByMessage(InboundHandoff):
    def _refusal(self, frame: frames.Frame) -> list[InboundOutput]:
        if self.state is InboundState.QUARANTINED:
            self.state = InboundState.LOST
            return [InboundFenced(self.ticket.id)]
        return super()._refusal(frame)


class SealsUnfenced(InboundHandoff):
    def _seal_if_fenced(self) -> list[InboundOutput]:
        original, self.try_fence = self.try_fence, lambda: True
        outputs = super()._seal_if_fenced()
        self.try_fence = original
        return outputs


class SealsUnderItsLock(OutboundHandoff):
    def _release_write(self) -> None:
        self.writes_in_flight -= 1


@dataclass(frozen=True)
class PlantedBug:
    scenario: Scenario
    expected_violation: str


PLANTED = [
    PlantedBug(
        replace(NO_FAULTS, is_one_sided=False, inbound_class=CommitsOneBlockEarly), "is sealed over"
    ),
    PlantedBug(
        replace(NO_FAULTS, max_endings=1, outbound_class=FreesWithoutAcknowledgement),
        "under a read",
    ),
    PlantedBug(
        replace(GHOST_SCENARIO, inbound_class=AcceptsAStaleIncarnation), "ticket 0 is sealed over"
    ),
    PlantedBug(replace(NO_FAULTS, max_endings=1, inbound_class=HonoursAnExpiredTicket), "expired"),
    PlantedBug(
        replace(ONE_ATTEMPT, is_one_sided=False, inbound_class=CountsADuplicate), "counted twice"
    ),
    PlantedBug(
        replace(NO_FAULTS, max_endings=1, inbound_class=ReleasesAQuarantineByMessage),
        "wrote blocks of",
    ),
    PlantedBug(replace(NO_FAULTS, inbound_class=SealsUnfenced), "sealed without the fence"),
    PlantedBug(replace(NO_FAULTS, outbound_class=SealsUnderItsLock), "sealed under a lock"),
]


def test_the_search_finds_a_fence_by_the_lock_alone() -> None:
    scenario = replace(
        ONE_ATTEMPT, fault_kinds=CRASHES_ONLY, has_devices=True, fences_by_lock_alone=True
    )
    with pytest.raises(InvariantViolation, match="wrote blocks of"):
        explore_all_states(scenario)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: _name(planted))
def test_the_search_finds_a_planted_bug(planted: PlantedBug) -> None:
    with pytest.raises(InvariantViolation, match=planted.expected_violation):
        explore_all_states(planted.scenario)


def _name(planted: PlantedBug) -> str:
    chosen = (planted.scenario.inbound_class, planted.scenario.outbound_class)
    return next(kind.__name__ for kind in chosen if kind not in (InboundHandoff, OutboundHandoff))
