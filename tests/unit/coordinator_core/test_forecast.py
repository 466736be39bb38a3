"""Forecasts of splits: what must hold whatever the workload is. How near they come is in test_advise_simulated.py."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.fit import Fit
from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.advisor import advise, choose
from coordinator.core.cost_model import NodeCosts
from coordinator.core.forecast import Forecaster, Machine
from coordinator.core.workload import Asked, Workload

# 1 ms for each prompt token; a step takes 20 ms, and 1 ms for each sequence
COSTS = NodeCosts(Fit((0.0, 1.024, 0.0)), Fit((0.02, 0.001, 0.0)))
MACHINE = Machine(COSTS, slots=16, cache_tokens=65536, transfer=(0.005, 0.0))
SLO = Slo(1.5, 0.032)
EIGHT = [Split(prefill, 8 - prefill) for prefill in range(1, 8)]


def asked(rate: float, prompt: int, output: float, burstiness: float = 1.0) -> Workload:
    return Workload(60.0, rate, burstiness, [Asked(prompt, output)] * 40)


def forecaster(workload: Workload, slo: Slo = SLO, machine: Machine = MACHINE) -> Forecaster:
    return Forecaster(workload, machine, slo)


def test_an_idle_cluster_is_as_fast_as_its_parts() -> None:
    told = forecaster(asked(0.01, 400, 50.0)).of(Split(4, 4))
    assert told.ttft_p50 == pytest.approx(0.405, abs=0.01)
    assert told.ttft_p99 == pytest.approx(0.405, abs=0.01)
    assert told.tpot == pytest.approx(0.02025, rel=0.01)
    assert told.share == pytest.approx(1.0, abs=1e-3)
    assert told.goodput == pytest.approx(0.01, rel=1e-3)


def test_work_is_matched_to_nodes() -> None:
    found = forecaster(asked(10.0, 400, 101.0), Slo())
    assert found.prefill_nodes() == pytest.approx(4.0)
    # 0.4 s to compute and 5 ms to hand off, then 100 steps of 36 ms, 16 at a time
    assert found.decode_nodes() == pytest.approx(10.0 * (0.405 + 3.6) / 16)
    tighter = forecaster(asked(10.0, 400, 101.0), Slo(tpot=0.028))
    assert tighter.decode_nodes() == pytest.approx(10.0 * (0.405 + 2.8) / 8)
    assert found.load(Split(4, 4)) == pytest.approx(1.0)


def test_small_caches_are_fewer_places() -> None:
    roomy, small = (Machine(COSTS, 16, tokens) for tokens in (65536, 2048))
    work = asked(10.0, 400, 101.0)
    assert forecaster(work, Slo(), small).decode_nodes() > 1.5 * forecaster(work, Slo(), roomy).decode_nodes()


def test_overload_is_worse_the_more_of_it_there_is() -> None:
    shares = [forecaster(asked(rate, 600, 10.0)).share(Split(4, 4)) for rate in (3.0, 5.0, 6.0, 7.0, 9.0, 20.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert 0.0 <= shares[-1] < 0.01


def test_bursts_need_room() -> None:
    even, lumpy = (forecaster(asked(5.0, 600, 10.0, bursts)).of(Split(4, 4)) for bursts in (1.0, 8.0))
    assert lumpy.ttft_p99 > 2 * even.ttft_p99
    assert lumpy.share < even.share


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
def test_whatever_is_asked_there_is_an_answer(
    rate: float,
    prompt: int,
    output: float,
    burstiness: float,
    slots: int,
    prefill: int,
    decode: int,
    slo: Slo,
) -> None:
    machine = Machine(COSTS, slots, 65536)
    told = forecaster(asked(rate, prompt, output, burstiness), slo, machine).of(Split(prefill, decode))
    assert 0.0 <= told.share <= 1.0
    assert 0.0 < told.ttft_p50 <= told.ttft_p90 <= told.ttft_p99
    assert all(math.isfinite(each) and each >= 0 for each in (told.tpot, told.goodput, told.load))


def test_more_nodes_of_a_role_never_make_it_slower() -> None:
    work = forecaster(asked(8.0, 500, 40.0))
    for fewer, more in itertools.pairwise(range(1, 10)):
        assert work.of(Split(more, 4)).ttft_p90 <= work.of(Split(fewer, 4)).ttft_p90 + 1e-6
        assert work.of(Split(4, more)).tpot <= work.of(Split(4, fewer)).tpot + 1e-9


@pytest.mark.parametrize(
    ("workload", "best"),
    [
        (asked(7.0, 680, 16.0), Split(7, 1)),
        (asked(13.0, 115, 120.0), Split(2, 6)),
        (asked(9.0, 400, 60.0), Split(5, 3)),
    ],
)
def test_the_split_follows_the_work(workload: Workload, best: Split) -> None:
    advice = advise(forecaster(workload), EIGHT, Split(4, 4), SLO)
    assert advice.best == best
    told = [one.split for one in advice.forecasts]
    assert told == sorted(told, key=lambda split: split.prefill)
    assert {best, Split(4, 4)} <= set(told)
    assert all(abs(split.prefill - best.prefill) <= 1 for split in told if split != Split(4, 4))
    assert "4:4" in advice.reason


def test_a_split_that_serves_as_well_is_left_alone() -> None:
    work = forecaster(asked(0.5, 100, 10.0))
    for present in EIGHT:
        assert choose(work, EIGHT, present)[0] == present
    advice = advise(work, EIGHT, Split(3, 5), SLO)
    assert advice.best == advice.present
    assert advice.reason.endswith("and no split more")


def test_without_an_objective_the_bottleneck_decides() -> None:
    work = forecaster(asked(14.0, 400, 101.0), Slo())
    best, share = choose(work, EIGHT, Split(1, 7))
    assert share == 1.0
    assert work.load(best) == min(work.load(split) for split in EIGHT)


def test_of_hundreds_of_nodes_only_the_likely_splits_are_looked_at() -> None:
    splits = [Split(prefill, 256 - prefill) for prefill in range(1, 256)]
    work = forecaster(asked(280.0, 600, 30.0))
    _, share = choose(work, splits, Split(128, 128))
    assert share >= max(work.share(split) for split in splits[::8]) - 0.02
