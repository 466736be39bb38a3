"""What is measured of demand and service."""

import random

import pytest

from baton.slo import Slo
from coordinator.core.estimates.workload import (
    HISTORY_SECONDS,
    MAX_EVENTS,
    StageSeconds,
    WorkloadMeter,
)

SLO = Slo(0.5, 0.05)


def arriving(moments: list[float], prompt: int = 100, output: float = 10.0) -> WorkloadMeter:
    meter = WorkloadMeter()
    for at in moments:
        meter.record_arrival(prompt, output, at)
    return meter


def test_rate_covers_window_or_time_since_start() -> None:
    meter = arriving([100.0 + each * 0.5 for each in range(40)])  # 20 s
    now = 120.0
    for seconds, span, count in ((10.0, 10.0, 19), (60.0, 20.0, 40)):
        found = meter.summarize_workload(seconds, now)
        assert found is not None
        assert (found.window_seconds, len(found.requests)) == pytest.approx((span, count))
        assert found.requests_per_second == pytest.approx(count / span)
    found = meter.summarize_workload(60.0, now)
    assert found is not None
    assert (found.prefill_tokens_per_second, found.decode_tokens_per_second) == pytest.approx(
        (200.0, 20.0)
    )
    assert meter.summarize_workload(10.0, now + HISTORY_SECONDS) is None
    assert WorkloadMeter().summarize_workload(10.0, 5.0) is None


def test_burstiness_of_poisson_and_bursty_arrivals() -> None:
    source = random.Random(1)
    even, bursts, now = [], [], 0.0
    while (now := now + source.expovariate(20.0)) < 60.0:
        even.append(now)
        bursts.append(now // 6.0 * 6.0 + (now % 6.0) / 3.0)  # all of 6 s within 2
    smooth, lumpy = (
        arriving(even).summarize_workload(60.0, 60.0),
        arriving(bursts).summarize_workload(60.0, 60.0),
    )
    assert smooth is not None
    assert lumpy is not None
    assert 0.4 < smooth.burstiness < 1.8
    assert lumpy.burstiness > 4 * smooth.burstiness


def test_computed_share_excludes_cached_tokens() -> None:
    meter = arriving([0.0, 1.0])
    for _ in range(2000):
        meter.record_prefill(25, 75)
    meter.record_prefill(0, 0)
    found = meter.summarize_workload(10.0, 2.0)
    assert found is not None
    assert found.computed_share == pytest.approx(0.25, abs=0.01)


def test_failures_miss_slo_and_are_not_in_stage_means() -> None:
    meter = WorkloadMeter()
    meter.record_end(0.4, 0.04, StageSeconds(0.1, 0.0, 0.2, 0.1), 1.0)
    meter.record_end(0.4, None, StageSeconds(0.3, 0.0, 0.0, 0.1), 2.0)
    meter.record_end(0.6, 0.04, StageSeconds(0.2, 0.0, 0.1, 0.1), 3.0)
    meter.record_end(0.4, 0.06, StageSeconds(0.2, 0.0, 0.1, 0.1), 4.0)
    meter.record_end(None, None, StageSeconds(9.0, 9.0, 9.0, 9.0), 5.0)
    service = meter.compute_slo_results(SLO, 60.0, 6.0)
    assert (service.ended_requests, service.good_requests, service.attainment) == (5, 2, 0.4)
    assert meter.compute_mean_stages(60.0, 6.0).queue == pytest.approx(0.2)
    assert meter.compute_slo_results(Slo(), 60.0, 6.0).good_requests == 4
    assert meter.compute_slo_results(SLO, 60.0, 100.0).attainment is None


def test_history_is_bounded() -> None:
    meter = arriving([each * 1e-3 for each in range(2 * MAX_EVENTS)])
    found = meter.summarize_workload(60.0, 2 * MAX_EVENTS * 1e-3)
    assert found is not None
    assert len(found.requests) == MAX_EVENTS
    assert found.requests_per_second == pytest.approx(1000.0, rel=0.01)


def test_rate_drops_after_full_history_and_pause() -> None:
    """As many as are kept, then nobody for long, then a few: they did not come within the moment
    that they took."""
    many, few = (
        [each * 1e-3 for each in range(MAX_EVENTS)],
        [60.0 + each * 1e-2 for each in range(30)],
    )
    found = arriving(many + few).summarize_workload(15.0, 60.3)
    assert found is not None
    assert found.requests_per_second == pytest.approx(2.0)


def test_refused_requests_count_as_demand() -> None:
    meter = arriving([0.5 + each for each in range(20)])
    for each in range(1000):
        meter.record_rejection(10.0 + each / 100)
    found = meter.summarize_workload(60.0, 20.0)
    assert found is not None
    assert found.requests_per_second == pytest.approx(1020 / 19.5)
    assert len(found.requests) == 20
    meter.record_end(0.1, 0.01, StageSeconds(), 20.0)
    service = meter.compute_slo_results(SLO, 60.0, 20.0)
    assert (service.ended_requests, service.good_requests) == (1001, 1)
    assert len(meter._refused) == 10
