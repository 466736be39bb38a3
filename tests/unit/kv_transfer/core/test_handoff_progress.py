"""What a hand-off reports of its slabs: when they were final, and when they had landed."""

from dataclasses import replace

from kv_transfer.core.handoff_progress import HandoffProgress
from kv_transfer.core.send_queue import ReadyGate
from tests.device_events import IdentityEvent


def test_slabs_are_final_when_they_are_announced_or_when_their_gate_has_passed() -> None:
    gate = ReadyGate({0: IdentityEvent()})
    progress = HandoffProgress().with_announced(None, num_landed=1, now=2.0)
    assert (progress.last_ready_at, progress.landed_before_last_layer) == (2.0, 1)
    progress = progress.with_announced(gate, num_landed=2, now=3.0)
    assert (progress.last_ready_at, progress.landed_before_last_layer) == (2.0, 1)
    gate.mark_passed(7.0)
    progress = progress.with_passed(gate, num_landed=5)
    assert (progress.last_ready_at, progress.landed_before_last_layer) == (7.0, 5)


def test_a_gate_that_has_passed_already_delays_nothing() -> None:
    gate = ReadyGate({0: IdentityEvent()})
    gate.mark_passed(1.0)
    progress = HandoffProgress().with_announced(gate, num_landed=0, now=4.0)
    assert progress.last_ready_at == 4.0


def test_durations_begin_with_what_came_last() -> None:
    progress = HandoffProgress(last_ready_at=5.0, last_landed_at=6.5)
    assert (progress.exposed_seconds, progress.commit_seconds(7.0)) == (1.5, 0.5)
    early = replace(progress, last_landed_at=4.0)  # nothing of the last step was sent
    assert (early.exposed_seconds, early.commit_seconds(7.0)) == (0.0, 2.0)
