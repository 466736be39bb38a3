"""What is measured of demand and service."""

import random

import pytest

from baton.slo import Slo
from coordinator.core.workload import KEPT, MOST, Stages, WorkloadMeter

SLO = Slo(0.5, 0.05)


def arriving(moments: list[float], prompt: int = 100, output: float = 10.0) -> WorkloadMeter:
    meter = WorkloadMeter()
    for at in moments:
        meter.arrived(prompt, output, at)
    return meter


def test_rates_are_of_the_window_or_of_what_there_is_of_it() -> None:
    meter = arriving([100.0 + each * 0.5 for each in range(40)])  # 20 s
    now = 120.0
    for seconds, span, count in ((10.0, 10.0, 19), (60.0, 20.0, 40)):
        found = meter.over(seconds, now)
        assert found is not None
        assert (found.seconds, len(found.requests)) == (pytest.approx(span), count)
        assert found.rate == pytest.approx(count / span)
    found = meter.over(60.0, now)
    assert found is not None
    assert (found.prefill_tokens, found.decode_tokens) == (pytest.approx(200.0), pytest.approx(20.0))
    assert meter.over(10.0, now + KEPT) is None
    assert WorkloadMeter().over(10.0, 5.0) is None


def test_a_poisson_process_has_burstiness_one_and_bursts_have_more() -> None:
    source = random.Random(1)
    even, bursts, now = [], [], 0.0
    while (now := now + source.expovariate(20.0)) < 60.0:
        even.append(now)
        bursts.append(now // 6.0 * 6.0 + (now % 6.0) / 3.0)  # all of 6 s within 2
    smooth, lumpy = arriving(even).over(60.0, 60.0), arriving(bursts).over(60.0, 60.0)
    assert smooth is not None
    assert lumpy is not None
    assert 0.4 < smooth.burstiness < 1.8
    assert lumpy.burstiness > 4 * smooth.burstiness


def test_what_caches_had_is_not_to_be_computed() -> None:
    meter = arriving([0.0, 1.0])
    for _ in range(2000):
        meter.prompt_done(25, 75)
    meter.prompt_done(0, 0)
    found = meter.over(10.0, 2.0)
    assert found is not None
    assert found.computed == pytest.approx(0.25, abs=0.01)


def test_failures_are_not_good_and_no_part_of_the_waits() -> None:
    meter = WorkloadMeter()
    meter.ended(0.4, 0.04, Stages(0.1, 0.0, 0.2, 0.1), 1.0)
    meter.ended(0.4, None, Stages(0.3, 0.0, 0.0, 0.1), 2.0)
    meter.ended(0.6, 0.04, Stages(0.2, 0.0, 0.1, 0.1), 3.0)
    meter.ended(0.4, 0.06, Stages(0.2, 0.0, 0.1, 0.1), 4.0)
    meter.ended(None, None, Stages(9.0, 9.0, 9.0, 9.0), 5.0)
    service = meter.service(SLO, 60.0, 6.0)
    assert (service.ended, service.good, service.share) == (5, 2, 0.4)
    assert meter.stages(60.0, 6.0).queue == pytest.approx(0.2)
    assert meter.service(Slo(), 60.0, 6.0).good == 4
    assert meter.service(SLO, 60.0, 100.0).share is None


def test_memory_is_bounded() -> None:
    meter = arriving([each * 1e-3 for each in range(2 * MOST)])
    found = meter.over(60.0, 2 * MOST * 1e-3)
    assert found is not None
    assert len(found.requests) == MOST
    assert found.rate == pytest.approx(1000.0, rel=0.01)


def test_a_pause_after_very_many_is_a_pause() -> None:
    """As many as are kept, then nobody for long, then a few: they did not come within the moment that they took."""
    many, few = [each * 1e-3 for each in range(MOST)], [60.0 + each * 1e-2 for each in range(30)]
    found = arriving(many + few).over(15.0, 60.3)
    assert found is not None
    assert found.rate == pytest.approx(2.0)


def test_what_is_refused_is_asked_for_and_not_served() -> None:
    meter = arriving([0.5 + each for each in range(20)])
    for each in range(1000):
        meter.refused(10.0 + each / 100)
    found = meter.over(60.0, 20.0)
    assert found is not None
    assert found.rate == pytest.approx(1020 / 19.5)
    assert len(found.requests) == 20
    meter.ended(0.1, 0.01, Stages(), 20.0)
    service = meter.service(SLO, 60.0, 20.0)
    assert (service.ended, service.good) == (1001, 1)
    assert len(meter._refused) == 10
