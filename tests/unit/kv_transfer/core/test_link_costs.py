"""Busy periods of a link: from the first message that it could carry to the last that landed."""

import pytest

from kv_transfer.core.link_costs import BusyPeriod, LinkCostEstimator, LinkUsage
from kv_transfer.core.send_queue import ReadyGate
from tests.device_events import IdentityEvent

MIB = 1 << 20


def _make_gate() -> ReadyGate:
    return ReadyGate({0: IdentityEvent()})


def test_a_period_has_all_messages_until_all_have_landed() -> None:
    usage = LinkUsage()
    assert usage.take_busy_period(0) is None
    usage.add_message(10, None, now=5.0)
    usage.add_message(20, None, now=6.0)
    assert usage.take_busy_period(20) is None
    assert usage.take_busy_period(0) == BusyPeriod(5.0, 2, 30)
    assert usage.take_busy_period(0) is None


def test_a_message_behind_a_gate_begins_when_the_gate_has_passed() -> None:
    usage, first, second = LinkUsage(), _make_gate(), _make_gate()
    usage.add_message(10, first, now=1.0)
    usage.add_message(20, second, now=1.0)
    assert usage.take_busy_period(30) is None
    first.passed_at = 3.0
    assert usage.take_busy_period(30) is None
    assert usage.take_busy_period(20) == BusyPeriod(3.0, 1, 10)
    assert usage.take_busy_period(20) is None
    second.passed_at = 4.0
    usage.add_message(5, second, now=3.5)  # credit came later than the gate
    assert usage.take_busy_period(25) is None
    assert usage.take_busy_period(0) == BusyPeriod(3.5, 2, 25)


def test_only_the_last_layer_is_written_after_a_gate() -> None:
    usage, gate = LinkUsage(), _make_gate()
    usage.add_message(80, gate, now=1.0, num_layers=8)
    assert usage.take_busy_period(80) is None
    gate.passed_at = 3.0
    assert usage.take_busy_period(80) is None
    assert usage.take_busy_period(0) == BusyPeriod(3.0, 1, 10)


def test_a_message_of_a_passed_gate_keeps_the_period_of_others_open() -> None:
    usage, gate = LinkUsage(), _make_gate()
    usage.add_message(10, None, now=1.0)
    usage.add_message(20, gate, now=1.0)
    assert usage.take_busy_period(20) == BusyPeriod(1.0, 1, 10)
    usage.add_message(10, None, now=2.0)
    gate.passed_at = 2.5
    assert usage.take_busy_period(20) is None
    assert usage.take_busy_period(0) == BusyPeriod(2.0, 2, 30)


def test_link_cost_is_learned_from_busy_periods() -> None:
    """First from a prior of another machine, and anew when the link changes."""
    estimator = LinkCostEstimator(MIB)
    for message, per_mib in ((0.002, 0.001), (0.0002, 0.01)):
        for number in range(200):
            count, size = 1 + number % 5, (number % 7 + 1) * MIB // 4
            period = BusyPeriod(100.0, count, count * size)
            took = count * (message + size / MIB * per_mib)
            estimator.observe_busy_period(period, 100.0 + took)
        assert estimator.cost.message_seconds == pytest.approx(message, rel=0.5)
        assert estimator.cost.byte_seconds * MIB == pytest.approx(per_mib, rel=0.2)
        assert estimator.cost.max_payload_bytes == MIB
