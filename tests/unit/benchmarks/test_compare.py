"""`bench compare`: what is sent, what is good, what follows, and which systems it refuses to
compare."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from baton.slo import Slo
from benchmarks.compare import parse_declared, parse_loads, parse_systems, parse_workloads
from benchmarks.load import endpoint_model as identity
from benchmarks.load.endpoint_model import EndpointModel, require_same_model
from benchmarks.load.http_stream import HttpTarget, parse_url
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.scenarios import comparison
from benchmarks.scenarios.comparison import (
    COMPARISON_WORKLOADS,
    ComparisonCell,
    ComparisonWorkload,
    GoodputRounds,
    IdleLatency,
)
from benchmarks.scenarios.comparison_report import describe_results, to_rows

SHORT, MIXED, LONG = COMPARISON_WORKLOADS
IDLE = {128: IdleLatency(0.1, 0.01), 2048: IdleLatency(1.0, 0.02)}


def measured(prompt: int, ttft: float, tpot: float, error: str = "") -> RequestMeasurement:
    """Nine tokens."""
    arrivals = [(10.0 + ttft + number * tpot, 1) for number in range(9)]
    return RequestMeasurement(
        10.0, 9, arrivals, ended_at=20.0, error=error, requested_prompt_tokens=prompt
    )


def test_every_eighth_prompt_of_the_mix_is_long_and_plans_are_the_same_for_everybody() -> None:
    plan = comparison.plan_arrivals(MIXED, 10.0, 20.0, "seed")
    assert plan == comparison.plan_arrivals(MIXED, 10.0, 20.0, "seed")
    assert [request.prompt_tokens for request in plan[:16]] == ([128] * 7 + [2048]) * 2
    assert 150 < len(plan) < 250
    assert plan[-1].start_seconds < 20.0
    assert len({request.seed for request in plan}) == len(plan)
    assert plan[0].salt == "seed", "no cache of another round has these prompts"


def test_a_load_of_one_is_a_request_in_the_time_that_one_takes() -> None:
    assert comparison.arrival_rate(ComparisonWorkload("w", (128,), 11), 2.0, IDLE) == pytest.approx(
        2.0 / 0.2
    )
    assert comparison.arrival_rate(
        ComparisonWorkload("w", (128, 2048), 11), 1.0, IDLE
    ) == pytest.approx(1.0 / ((0.2 + 1.2) / 2))


def test_good_is_twice_idle_for_prompts_of_that_length() -> None:
    bounds = comparison.slos_by_length(IDLE)
    assert bounds == {128: Slo(0.2, 0.02), 2048: Slo(2.0, 0.04)}
    seen = [
        measured(128, 0.19, 0.019),
        measured(128, 0.21, 0.01),
        measured(128, 0.1, 0.021),
        measured(2048, 1.9, 0.03),
        measured(128, 0.1, 0.01, error="timeout"),
        RequestMeasurement(10.0, 9, requested_prompt_tokens=128, error="unfinished"),
    ]
    assert comparison.compute_goodput(seen, bounds, 4.0) == 0.5


def test_idle_figures_are_medians_and_failures_are_told() -> None:
    seen = [measured(128, ttft, 0.01) for ttft in (0.1, 0.3, 0.2)]
    assert comparison.idle_latency(seen).ttft == pytest.approx(0.2)
    with pytest.raises(ValueError, match="idle system failed: timeout"):
        comparison.idle_latency([*seen, measured(128, 0.1, 0.1, error="timeout")])


def test_the_bounds_are_those_of_the_better_fixed_mode() -> None:
    arms = {
        "a": {128: IdleLatency(0.1, 0.03)},
        "b": {128: IdleLatency(0.2, 0.02)},
        "auto": {128: IdleLatency(0.05, 0.01)},
    }
    assert comparison.best_idle_latency(arms, ["a", "b"]) == {128: IdleLatency(0.1, 0.02)}


RESULTS = {
    "disaggregated": {
        ComparisonCell("short", 1.0): GoodputRounds((8.0, 9.0, 7.0)),
        ComparisonCell("short", 2.0): GoodputRounds((12.0,)),
    },
    "colocated": {
        ComparisonCell("short", 1.0): GoodputRounds((10.0,)),
        ComparisonCell("short", 2.0): GoodputRounds((6.0,)),
    },
    "auto": {
        ComparisonCell("short", 1.0): GoodputRounds((9.0,)),
        ComparisonCell("short", 2.0): GoodputRounds((11.4,)),
    },
}


def test_the_verdict_names_the_best_and_where_disaggregation_loses() -> None:
    assert list(comparison.losing_cells(RESULTS, "disaggregated", "colocated")) == [
        (ComparisonCell("short", 1.0), 0.8)
    ]
    lines = describe_results(RESULTS, [SHORT], "auto")
    assert lines == [
        "short: auto has 0.95 of the peak goodput of disaggregated (11.40 of 12.00 requests/s)",
        "disaggregation loses at: short/1 (80% of colocated)",
    ]
    assert describe_results({"a": RESULTS["auto"], "b": RESULTS["colocated"]}, [SHORT], "a")[
        -1
    ].startswith("short: a has 1.14")


def test_rows_carry_medians_their_spread_and_the_ratios() -> None:
    local = {ComparisonCell("short", 1.0): 0.25}
    rows = {
        row.name: row.value
        for row in to_rows(
            RESULTS, local, comparison.slos_by_length(IDLE), [SHORT], "auto", "command"
        )
    }
    assert rows["compare/short/1/disaggregated/goodput"] == 8.0
    assert rows["compare/short/1/disaggregated/spread"] == 0.25
    assert rows["compare/short/1/auto_of_best"] == 0.9
    assert rows["compare/short/1/auto_local"] == 0.25
    assert rows["compare/short/auto_of_best"] == pytest.approx(0.95)
    assert rows["compare/slo/2048/ttft"] == 2000.0


def test_zero_goodput_everywhere_counts_as_equal() -> None:
    nothing = {
        name: {ComparisonCell("long", 1.0): GoodputRounds((0.0,))}
        for name in ("disaggregated", "colocated", "auto")
    }
    assert describe_results(nothing, [LONG], "auto")[0].startswith("long: auto has 1.00")
    assert list(comparison.losing_cells(nothing, "disaggregated", "colocated")) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (parse_workloads, "short,wide"),
        (parse_workloads, ""),
        (parse_loads, "0"),
        (parse_loads, ""),
        (parse_systems, ["a=http://x"]),
        (parse_systems, ["a=http://x", "a=http://y"]),
        (parse_systems, ["http://x", "b="]),
        (parse_declared, ["colour=red"]),
        (parse_declared, ["dtype"]),
    ],
)
def test_malformed_options_are_rejected(call: object, words: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call(words)  # type: ignore[operator]


# who is compared with whom

ONE = EndpointModel("m", "float32", "none", "d1")


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (EndpointModel("m", "bfloat16", "none", "d1"), "dtype"),
        (EndpointModel("m", "float32", "int8", "d1"), "quantization"),
        (EndpointModel("m", "float32", "none", "d2"), "digest"),
        (EndpointModel("n", "float32", "none", ""), "model"),
    ],
)
def test_unequal_systems_are_refused_naming_what_differs(
    other: EndpointModel, differs: str
) -> None:
    with pytest.raises(ValueError, match=f"a and b do not compare: {differs} is"):
        require_same_model({"a": ONE, "b": other})


def test_equal_models_may_have_other_names_and_names_count_where_there_is_no_digest() -> None:
    require_same_model({"a": ONE, "b": EndpointModel("alias", "float32", "none", "d1"), "c": ONE})
    require_same_model({"a": ONE, "b": EndpointModel("m", "float32", "none")})


@pytest.fixture
async def target() -> AsyncIterator[HttpTarget]:
    """Serves two models: one that says all, one that says what the standard asks."""
    card = {"id": "m", "model_digest": "d1", "dtype": "float32", "quantization": "none"}
    body = json.dumps({"data": [card, {"id": "bare", "object": "model"}]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = "200 OK" if b"GET /v1/models " in head else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_an_endpoint_says_what_it_serves_or_somebody_declares_it(target: HttpTarget) -> None:
    assert await identity.fetch_endpoint_model(target, "", "", {}) == ONE
    assert await identity.fetch_endpoint_model(target, "", "m", {"dtype": "float32"}) == ONE
    with pytest.raises(ValueError, match="does not say its dtype and quantization: declare it"):
        await identity.fetch_endpoint_model(target, "", "bare", {})
    declared = {"dtype": "float32", "quantization": "none"}
    assert await identity.fetch_endpoint_model(target, "", "bare", declared) == EndpointModel(
        "bare", "float32", "none"
    )
    with pytest.raises(ValueError, match="says dtype=float32"):
        await identity.fetch_endpoint_model(target, "", "m", {"dtype": "bfloat16"})
    with pytest.raises(ValueError, match="does not serve 'other'"):
        await identity.fetch_endpoint_model(target, "", "other", {})


async def test_unreachable_endpoint_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not state what it serves"):
        await identity.fetch_endpoint_model(parse_url("http://127.0.0.1:9"), "", "", {})
