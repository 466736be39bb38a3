"""`bench compare`: what is sent, what is good, what follows, and which systems it refuses to compare."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from baton.slo import Slo
from benchmarks import comparison, identity
from benchmarks.compare import chosen, parse_declared, parse_loads, parse_systems, to_rows, verdict
from benchmarks.comparison import WORKLOADS, Cell, Goodput, Idle, Workload
from benchmarks.http_stream import Target, parse_url
from benchmarks.identity import Identity, require_equal
from benchmarks.measurement import Measurement

SHORT, MIXED, LONG = WORKLOADS
IDLE = {128: Idle(0.1, 0.01), 2048: Idle(1.0, 0.02)}


def measured(prompt: int, ttft: float, tpot: float, error: str = "") -> Measurement:
    """Nine tokens."""
    arrivals = [(10.0 + ttft + number * tpot, 1) for number in range(9)]
    return Measurement(10.0, 9, arrivals, ended=20.0, error=error, asked_prompt=prompt)


def test_every_eighth_prompt_of_the_mix_is_long_and_plans_are_the_same_for_everybody() -> None:
    made = comparison.plan(MIXED, 10.0, 20.0, "seed")
    assert made == comparison.plan(MIXED, 10.0, 20.0, "seed")
    assert [one.prompt_tokens for one in made[:16]] == ([128] * 7 + [2048]) * 2
    assert 150 < len(made) < 250
    assert made[-1].at < 20.0
    assert len({one.seed for one in made}) == len(made)
    assert made[0].salt == "seed", "no cache of another round has these prompts"


def test_a_load_of_one_is_a_request_in_the_time_that_one_takes() -> None:
    assert comparison.rate(Workload("w", (128,), 11), 2.0, IDLE) == pytest.approx(2.0 / 0.2)
    assert comparison.rate(Workload("w", (128, 2048), 11), 1.0, IDLE) == pytest.approx(1.0 / ((0.2 + 1.2) / 2))


def test_good_is_twice_idle_for_prompts_of_that_length() -> None:
    bounds = comparison.slos(IDLE)
    assert bounds == {128: Slo(0.2, 0.02), 2048: Slo(2.0, 0.04)}
    seen = [
        measured(128, 0.19, 0.019),
        measured(128, 0.21, 0.01),
        measured(128, 0.1, 0.021),
        measured(2048, 1.9, 0.03),
        measured(128, 0.1, 0.01, error="timeout"),
        Measurement(10.0, 9, asked_prompt=128, error="unfinished"),
    ]
    assert comparison.goodput(seen, bounds, 4.0) == 0.5


def test_idle_figures_are_medians_and_failures_are_told() -> None:
    seen = [measured(128, ttft, 0.01) for ttft in (0.1, 0.3, 0.2)]
    assert comparison.idle_of(seen).ttft == pytest.approx(0.2)
    with pytest.raises(ValueError, match="idle system failed: timeout"):
        comparison.idle_of([*seen, measured(128, 0.1, 0.1, error="timeout")])


def test_the_bounds_are_those_of_the_better_fixed_mode() -> None:
    arms = {"a": {128: Idle(0.1, 0.03)}, "b": {128: Idle(0.2, 0.02)}, "auto": {128: Idle(0.05, 0.01)}}
    assert comparison.best_idle(arms, ["a", "b"]) == {128: Idle(0.1, 0.02)}


RESULTS = {
    "disaggregated": {Cell("short", 1.0): Goodput((8.0, 9.0, 7.0)), Cell("short", 2.0): Goodput((12.0,))},
    "colocated": {Cell("short", 1.0): Goodput((10.0,)), Cell("short", 2.0): Goodput((6.0,))},
    "auto": {Cell("short", 1.0): Goodput((9.0,)), Cell("short", 2.0): Goodput((11.4,))},
}


def test_the_verdict_names_the_best_and_where_disaggregation_loses() -> None:
    assert list(comparison.losing(RESULTS, "disaggregated", "colocated")) == [(Cell("short", 1.0), 0.8)]
    lines = verdict(RESULTS, [SHORT], "auto")
    assert lines == [
        "short: auto has 0.95 of the peak goodput of disaggregated (11.40 of 12.00 requests/s)",
        "disaggregation loses at: short/1 (80% of colocated)",
    ]
    assert verdict({"a": RESULTS["auto"], "b": RESULTS["colocated"]}, [SHORT], "a")[-1].startswith("short: a has 1.14")


def test_rows_carry_medians_their_spread_and_the_ratios() -> None:
    local = {Cell("short", 1.0): 0.25}
    rows = {one.name: one.value for one in to_rows(RESULTS, local, comparison.slos(IDLE), [SHORT], "auto", "command")}
    assert rows["compare/short/1/disaggregated/goodput"] == 8.0
    assert rows["compare/short/1/disaggregated/spread"] == 0.25
    assert rows["compare/short/1/auto_of_best"] == 0.9
    assert rows["compare/short/1/auto_local"] == 0.25
    assert rows["compare/short/auto_of_best"] == pytest.approx(0.95)
    assert rows["compare/slo/2048/ttft"] == 2000.0


def test_where_nothing_was_good_nobody_is_worse() -> None:
    nothing = {name: {Cell("long", 1.0): Goodput((0.0,))} for name in ("disaggregated", "colocated", "auto")}
    assert verdict(nothing, [LONG], "auto")[0].startswith("long: auto has 1.00")
    assert list(comparison.losing(nothing, "disaggregated", "colocated")) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (chosen, "short,wide"),
        (chosen, ""),
        (parse_loads, "0"),
        (parse_loads, ""),
        (parse_systems, ["a=http://x"]),
        (parse_systems, ["a=http://x", "a=http://y"]),
        (parse_systems, ["http://x", "b="]),
        (parse_declared, ["colour=red"]),
        (parse_declared, ["dtype"]),
    ],
)
def test_words_that_make_no_sense_are_refused(call: object, words: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call(words)  # type: ignore[operator]


# who is compared with whom

ONE = Identity("m", "float32", "none", "d1")


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (Identity("m", "bfloat16", "none", "d1"), "dtype"),
        (Identity("m", "float32", "int8", "d1"), "quantization"),
        (Identity("m", "float32", "none", "d2"), "digest"),
        (Identity("n", "float32", "none", ""), "model"),
    ],
)
def test_unequal_systems_are_refused_naming_what_differs(other: Identity, differs: str) -> None:
    with pytest.raises(ValueError, match=f"a and b do not compare: {differs} is"):
        require_equal({"a": ONE, "b": other})


def test_equal_models_may_have_other_names_and_names_count_where_there_is_no_digest() -> None:
    require_equal({"a": ONE, "b": Identity("alias", "float32", "none", "d1"), "c": ONE})
    require_equal({"a": ONE, "b": Identity("m", "float32", "none")})


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    """Serves two models: one that says all, one that says what the standard asks."""
    told = {"id": "m", "model_digest": "d1", "dtype": "float32", "quantization": "none"}
    body = json.dumps({"data": [told, {"id": "bare", "object": "model"}]})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = "200 OK" if b"GET /v1/models " in head else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_an_endpoint_says_what_it_serves_or_somebody_declares_it(target: Target) -> None:
    assert await identity.ask(target, "", "", {}) == ONE
    assert await identity.ask(target, "", "m", {"dtype": "float32"}) == ONE
    with pytest.raises(ValueError, match="does not say its dtype and quantization: declare it"):
        await identity.ask(target, "", "bare", {})
    declared = {"dtype": "float32", "quantization": "none"}
    assert await identity.ask(target, "", "bare", declared) == Identity("bare", "float32", "none")
    with pytest.raises(ValueError, match="says dtype=float32"):
        await identity.ask(target, "", "m", {"dtype": "bfloat16"})
    with pytest.raises(ValueError, match="does not serve 'other'"):
        await identity.ask(target, "", "other", {})


async def test_an_endpoint_that_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="does not say what it serves"):
        await identity.ask(parse_url("http://127.0.0.1:9"), "", "", {})
