"""Properties that forecasts of splits have for any workload. test_advice_simulated.py tests
their accuracy."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.workload import RequestShape, WorkloadSummary
from coordinator.core.ratio.advisor import choose_split, compute_advice
from coordinator.core.ratio.split_forecast import NodeProfile, SplitForecaster
from tests.unit.coordinator.core.ratio.sample_profile import (
    COSTS,
    EIGHT,
    NODE_PROFILE,
    SLO,
)


def make_workload(
    rate: float, prompt: int, output: float, burstiness: float = 1.0
) -> WorkloadSummary:
    return WorkloadSummary(60.0, rate, burstiness, [RequestShape(prompt, output)] * 40)


def make_forecaster(
    workload: WorkloadSummary, slo: Slo = SLO, machine: NodeProfile = NODE_PROFILE
) -> SplitForecaster:
    return SplitForecaster(workload, machine, slo)


def test_idle_cluster_latency_is_sum_of_stages() -> None:
    told = make_forecaster(make_workload(0.01, 400, 50.0)).forecast_split(RoleSplit(4, 4))
    assert told.ttft_p50 == pytest.approx(0.405, abs=0.01)
    assert told.ttft_p99 == pytest.approx(0.405, abs=0.01)
    assert told.tpot_mean == pytest.approx(0.02025, rel=0.01)
    assert told.slo_attainment == pytest.approx(1.0, abs=1e-3)
    assert told.goodput == pytest.approx(0.01, rel=1e-3)


def test_busy_nodes_follow_offered_work() -> None:
    found = make_forecaster(make_workload(10.0, 400, 101.0), Slo())
    assert found.busy_prefill_nodes() == pytest.approx(4.0)
    # 0.4 s to compute and 5 ms to hand off, then 100 steps of 36 ms, 16 at a time
    assert found.busy_decode_nodes() == pytest.approx(10.0 * (0.405 + 3.6) / 16)
    tighter = make_forecaster(make_workload(10.0, 400, 101.0), Slo(tpot_seconds=0.028))
    assert tighter.busy_decode_nodes() == pytest.approx(10.0 * (0.405 + 2.8) / 8)
    assert found.compute_bottleneck_load(RoleSplit(4, 4)) == pytest.approx(1.0)


def test_small_caches_reduce_batch_slots() -> None:
    roomy, small = (NodeProfile(COSTS, 16, tokens) for tokens in (65536, 2048))
    work = make_workload(10.0, 400, 101.0)
    assert (
        make_forecaster(work, Slo(), small).busy_decode_nodes()
        > 1.5 * make_forecaster(work, Slo(), roomy).busy_decode_nodes()
    )


def test_attainment_falls_with_load() -> None:
    shares = [
        make_forecaster(make_workload(rate, 600, 10.0)).compute_attainment(RoleSplit(4, 4))
        for rate in (3.0, 5.0, 6.0, 7.0, 9.0, 20.0)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0.0 <= shares[-1] < 0.01


def test_burstiness_raises_tail_ttft() -> None:
    even, lumpy = (
        make_forecaster(make_workload(5.0, 600, 10.0, bursts)).forecast_split(RoleSplit(4, 4))
        for bursts in (1.0, 8.0)
    )
    assert lumpy.ttft_p99 > 2 * even.ttft_p99
    assert lumpy.slo_attainment < even.slo_attainment


@pytest.mark.slow
@settings(max_examples=60)
@given(
    rate=st.floats(1e-3, 1e4),
    prompt=st.integers(1, 100_000),
    output=st.floats(1.0, 10_000.0),
    burstiness=st.floats(0.25, 16.0),
    slots=st.integers(1, 4096),
    prefill=st.integers(1, 300),
    decode=st.integers(1, 300),
    slo=st.sampled_from([Slo(), Slo(0.5), Slo(None, 0.05), Slo(0.5, 0.05), Slo(1e-6, 1e-6)]),
)
def test_forecasts_are_finite_for_any_workload(
    rate: float,
    prompt: int,
    output: float,
    burstiness: float,
    slots: int,
    prefill: int,
    decode: int,
    slo: Slo,
) -> None:
    machine = NodeProfile(COSTS, slots, 65536)
    told = make_forecaster(
        make_workload(rate, prompt, output, burstiness), slo, machine
    ).forecast_split(RoleSplit(prefill, decode))
    assert 0.0 <= told.slo_attainment <= 1.0
    assert 0.0 < told.ttft_p50 <= told.ttft_p90 <= told.ttft_p99
    assert all(
        math.isfinite(each) and each >= 0
        for each in (told.tpot_mean, told.goodput, told.bottleneck_load)
    )


def test_more_nodes_never_raise_latency() -> None:
    work = make_forecaster(make_workload(8.0, 500, 40.0))
    for fewer, more in itertools.pairwise(range(1, 10)):
        assert (
            work.forecast_split(RoleSplit(more, 4)).ttft_p90
            <= work.forecast_split(RoleSplit(fewer, 4)).ttft_p90 + 1e-6
        )
        assert (
            work.forecast_split(RoleSplit(4, more)).tpot_mean
            <= work.forecast_split(RoleSplit(4, fewer)).tpot_mean + 1e-9
        )


@pytest.mark.parametrize(
    ("workload", "best"),
    [
        (make_workload(7.0, 680, 16.0), RoleSplit(7, 1)),
        (make_workload(13.0, 115, 120.0), RoleSplit(2, 6)),
        (make_workload(9.0, 400, 60.0), RoleSplit(5, 3)),
    ],
)
def test_best_split_follows_workload(workload: WorkloadSummary, best: RoleSplit) -> None:
    advice = compute_advice(make_forecaster(workload), EIGHT, RoleSplit(4, 4), SLO)
    assert advice.best_split == best
    told = [one.split for one in advice.forecasts]
    assert told == sorted(told, key=lambda split: split.prefill_nodes)
    assert {best, RoleSplit(4, 4)} <= set(told)
    assert all(
        abs(split.prefill_nodes - best.prefill_nodes) <= 1
        for split in told
        if split != RoleSplit(4, 4)
    )
    assert "4:4" in advice.reason


def test_current_split_is_kept_when_as_good() -> None:
    work = make_forecaster(make_workload(0.5, 100, 10.0))
    for present in EIGHT:
        assert choose_split(work, EIGHT, present)[0] == present
    advice = compute_advice(work, EIGHT, RoleSplit(3, 5), SLO)
    assert advice.best_split == advice.current_split
    assert advice.reason.endswith("and no split more")


def test_bottleneck_decides_without_slo() -> None:
    work = make_forecaster(make_workload(14.0, 400, 101.0), Slo())
    best, share = choose_split(work, EIGHT, RoleSplit(1, 7))
    assert share == 1.0
    assert work.compute_bottleneck_load(best) == min(
        work.compute_bottleneck_load(split) for split in EIGHT
    )


def test_only_least_loaded_splits_are_evaluated() -> None:
    splits = [RoleSplit(prefill, 256 - prefill) for prefill in range(1, 256)]
    work = make_forecaster(make_workload(280.0, 600, 30.0))
    _, share = choose_split(work, splits, RoleSplit(128, 128))
    assert share >= max(work.compute_attainment(split) for split in splits[::8]) - 0.02
