"""The arithmetic of the benchmarks: samples, schedules, objectives."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.slo import Slo, parse_slo
from benchmarks.figures.percentiles import percentile, summarize
from benchmarks.figures.report import reproducing_command
from benchmarks.load.measurement import RequestMeasurement, evaluate_cell
from benchmarks.load.request_plan import (
    ClosedLoop,
    LengthDistribution,
    PoissonArrivals,
    make_text_prompt,
    make_token_prompt,
    parse_lengths,
    plan_requests,
    poisson_times,
)
from benchmarks.serve import parse_loads, to_rows

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_a_summary_of_known_numbers() -> None:
    summary = summarize([float(n) for n in range(101)])
    assert summary is not None
    assert (summary.count, summary.mean, summary.p50, summary.p90, summary.p99, summary.max) == (
        101, 50.0, 50.0, 90.0, 99.0, 100.0,
    )  # fmt: skip
    assert summarize([]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", LengthDistribution("fixed", 512)),
        ("uniform:100:800", LengthDistribution("uniform", 100, 800)),
        ("lognormal:256:0.8", LengthDistribution("lognormal", 256, 0.8)),
        ("lognormal:256:0.8:2048", LengthDistribution("lognormal", 256, 0.8, 2048)),
    ],
)
def test_lengths_are_read(text: str, expected: LengthDistribution) -> None:
    assert parse_lengths(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-4", "x", "uniform:8:4", "uniform:8", "lognormal:8:-1", "lognormal:8:1:0"]
)
def test_lengths_that_make_no_sense_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not N"):
        parse_lengths(text)


def test_drawn_lengths_follow_their_distribution() -> None:
    source = random.Random(1)
    assert {LengthDistribution("fixed", 7).sample(source) for _ in range(9)} == {7}
    uniform = [LengthDistribution("uniform", 3, 5).sample(source) for _ in range(500)]
    assert set(uniform) == {3, 4, 5}
    lognormal = [LengthDistribution("lognormal", 200, 0.5, 900).sample(source) for _ in range(4000)]
    assert statistics.median(lognormal) == pytest.approx(200, rel=0.05)
    assert max(lognormal) <= 900
    assert statistics.stdev(np.log(lognormal)) == pytest.approx(0.5, rel=0.1)


def test_arrivals_are_a_poisson_process() -> None:
    source = poisson_times(20.0, random.Random(3))
    moments = [next(source) for _ in range(8000)]
    gaps = np.diff([0.0, *moments])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential: deviation equals mean


def test_a_plan_is_fixed_by_its_seed_and_fresh_without() -> None:
    lengths = LengthDistribution("uniform", 1, 900)
    first, same, other = (
        plan_requests(PoissonArrivals(5.0), lengths, lengths, 40, seed) for seed in ("a", "a", "b")
    )
    assert first == same
    assert not {request.seed for request in first} & {request.seed for request in other}
    assert len({request.seed for request in first}) == 40
    assert [request.start_seconds for request in first] == sorted(
        request.start_seconds for request in first
    )
    assert {
        request.start_seconds for request in plan_requests(ClosedLoop(2), lengths, lengths, 5, "a")
    } == {0.0}


def test_prompts_have_the_planned_length_and_stay_in_the_vocabulary() -> None:
    for request in plan_requests(
        ClosedLoop(1),
        LengthDistribution("uniform", 1, 300),
        LengthDistribution("fixed", 1),
        20,
        "s",
    ):
        tokens = make_token_prompt(request, 500)
        assert len(tokens) == request.prompt_tokens
        assert min(tokens) >= 16
        assert max(tokens) < 500
        assert tokens == make_token_prompt(request, 500)
        assert len(make_text_prompt(request).split()) == request.prompt_tokens


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms,tpot=50ms", Slo(0.5, 0.05)),
        ("tpot=2s", Slo(None, 2.0)),
        ("ttft=250us", Slo(0.00025, None)),
    ],
)
def test_objectives_are_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=5ms,ttft=6ms", "e2e=5s", "ttft=-5ms"])
def test_objectives_that_make_no_sense_are_quoted(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not ttft=TIME"):
        parse_slo(text)


def measurement(
    due: float, *arrived: tuple[float, int], usage: int | None = None, error: str = ""
) -> RequestMeasurement:
    return RequestMeasurement(
        due, 8, list(arrived), arrived[-1][0] if arrived else due + 1.0, usage, error
    )


def test_what_follows_from_the_arrivals_of_one_request() -> None:
    request = measurement(10.0, (10.5, 1), (10.7, 2), (11.1, 2))
    assert request.received_tokens == 5
    assert request.ttft == pytest.approx(0.5)
    assert request.tpot == pytest.approx(0.6 / 4)
    assert request.inter_token_gaps == pytest.approx([0.2, 0.4])
    assert measurement(0.0, (1.0, 3)).tpot is None


def test_errors_are_counted_apart_and_are_not_good() -> None:
    seen = [
        measurement(0.0, (0.1, 1), (0.2, 1), usage=2),
        measurement(0.0, (0.1, 1), (1.1, 1), usage=3),  # too slow a second token, and miscounted
        measurement(0.5, (0.6, 1), error="error event"),
        measurement(1.0, error="timeout"),
        measurement(1.0),
    ]
    result = evaluate_cell("c2", seen, Slo(ttft_seconds=0.2, tpot_seconds=0.5))
    assert (
        result.sent_count,
        result.succeeded_count,
        result.good_count,
        result.miscounted_count,
    ) == (5, 2, 1, 1)
    assert result.error_counts == {"error event": 1, "timeout": 1, "no tokens": 1}
    assert result.seconds == pytest.approx(2.0)
    assert result.goodput == pytest.approx(0.5)
    assert result.tokens_per_second == pytest.approx(2.0)
    assert result.ttft is not None
    assert result.ttft.count == 2
    assert result.itl is not None
    assert result.itl.max == pytest.approx(1.0)


def test_nothing_sent_is_not_a_crash() -> None:
    result = evaluate_cell("c1", [], Slo())
    assert (result.sent_count, result.goodput, result.ttft) == (0, 0.0, None)
    assert {row.value for row in to_rows(result, Slo(), "x")} == {0.0}


def test_rows_hold_the_tail_against_the_objective() -> None:
    result = evaluate_cell("c1", [measurement(0.0, (0.1, 1), (0.2, 1))], Slo())
    rows = {row.name: row for row in to_rows(result, Slo(ttft_seconds=0.2), "the command")}
    tail = rows["serve/c1/ttft_p99"]
    assert (tail.unit, tail.limit) == ("ms", 200.0)
    assert (tail.value, tail.share) == pytest.approx((100.0, 0.5))
    assert rows["serve/c1/tpot_p99"].limit is None
    assert {row.command for row in rows.values()} == {"the command"}


@pytest.mark.parametrize("given", [["--api-key", "sesame"], ["--api-key=sesame"]])
def test_a_row_does_not_give_the_key_away(given: list[str]) -> None:
    command = reproducing_command(["serve", *given, "--url", "http://x/a b"])
    assert "sesame" not in command
    assert command.endswith("--url 'http://x/a b'")


def test_loads_are_read() -> None:
    assert parse_loads("1,4", "2.5") == [ClosedLoop(1), ClosedLoop(4), PoissonArrivals(2.5)]
    for nonsense in (("", ""), ("0", ""), ("", "-1"), ("x", "")):
        with pytest.raises(ValueError, match=r".+"):
            parse_loads(*nonsense)
