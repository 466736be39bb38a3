"""What the served figures are made of: rows, requests, sizes and the table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.slo import Slo
from benchmarks.device import served
from benchmarks.device.served_rows import (
    RowFigures,
    ServedRow,
    choose_cache_bytes,
    combine_rounds,
    describe_errors,
    fit_together,
    make_served_table,
    parse_rows,
)
from benchmarks.device.step_bounds import ServedBound
from benchmarks.gpu import TABLE_ROWS
from benchmarks.load.measurement import CellResult, RequestMeasurement, evaluate_cell
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

GREEDY, SAMPLED = ServedRow(128, 128, 8), ServedRow(128, 128, 8, is_sampled=True)


def answered(start: float, tokens: int, ttft: float = 0.02) -> RequestMeasurement:
    """A request of which each token after the first takes 5 ms."""
    found = RequestMeasurement(start, tokens, usage_tokens=tokens)
    found.token_arrivals = [(start + ttft + 0.005 * n, 1) for n in range(tokens)]
    found.ended_at = found.token_arrivals[-1][0]
    return found


def test_rows_of_the_table_with_sampled_ones_behind_greedy_ones() -> None:
    names = [row.name for row in parse_rows(TABLE_ROWS, sampled=(1, 32, 64))]
    assert names == [
        *("128_128_c1", "128_128_c1_sampled", "128_128_c8", "128_128_c32", "128_128_c32_sampled"),
        *("128_128_c64", "128_128_c64_sampled", "2048_64_c1", "2048_64_c8"),
    ]


@pytest.mark.parametrize("text", ["", "128:1", "128/128", "128/128:", "128/0:1", "a/b:1", "1/1:1;"])
def test_bad_rows_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not PROMPT/OUTPUT:CLIENTS"):
        parse_rows(text, sampled=())


@pytest.mark.parametrize(("concurrency", "requests"), [(1, 5), (8, 24), (32, 64), (64, 128)])
def test_every_client_sends_several_requests(concurrency: int, requests: int) -> None:
    assert ServedRow(128, 128, concurrency).num_requests == requests


def test_the_cache_holds_the_largest_row(tmp_path: Path) -> None:
    bounds = make_tiny_run(tmp_path).model.bounds
    rows = parse_rows("128/128:1,64;2048/64:8", sampled=())
    chosen = choose_cache_bytes(rows, bounds)
    assert chosen % (1 << 30) == 0
    assert chosen >= 8 * (2048 + 64) * bounds.kv_token_bytes


def test_servers_run_together_if_the_device_holds_all() -> None:
    assert fit_together(2, 30, 60)
    assert not fit_together(3, 30, 60)


def evaluate(*measurements: RequestMeasurement) -> CellResult:
    return evaluate_cell("row", measurements, Slo())


def failed(error: str) -> RequestMeasurement:
    return RequestMeasurement(0.0, 4, error=error)


def test_figures_are_medians_over_the_rounds() -> None:
    rounds = [evaluate(answered(0.0, 11, ttft)) for ttft in (0.02, 0.5, 0.03)]
    figures = combine_rounds([*rounds[:2], evaluate(failed("timeout"), answered(0.0, 11, 0.03))])
    assert figures is not None
    assert figures.ttft == pytest.approx(0.03)
    assert figures.tpot == pytest.approx(0.005)
    assert figures.longest_gap == pytest.approx(0.005)
    assert figures.tokens_per_second == pytest.approx(11 / 0.08)
    assert figures.note == "median of 3 rounds; 1 timeout"
    assert combine_rounds([evaluate(failed("http 500"))]) is None
    assert combine_rounds([]) is None


def test_table_has_a_column_for_each_system() -> None:
    figures = combine_rounds([evaluate(answered(0.0, 11), answered(0.1, 11))])
    assert figures is not None
    assert figures.note == "one round"
    output = io.StringIO()
    results = {"colocated": {GREEDY: figures, SAMPLED: figures}, "vllm": {GREEDY: figures}}
    Console(file=output, width=160).print(make_served_table(results, {GREEDY: 1529.2}))
    lines = output.getvalue().splitlines()
    greedy = next(line for line in lines if line.strip().startswith("128_128_c8 "))
    sampled = next(line for line in lines if "128_128_c8_sampled" in line)
    assert "1,529" in greedy
    assert greedy.count("20.0 / 5.00, 129") == 2
    assert sampled.split()[-1] == "-"
    assert describe_errors([evaluate(failed("http 500"))] * 2) == "2 http 500"


def test_ratios_to_greedy_and_to_vllm(tmp_path: Path) -> None:
    fast = RowFigures(1, 0.01, 0.005, 0.02, 1000.0, "")
    slow = RowFigures(1, 0.02, 0.01, 0.04, 500.0, "")
    run = make_tiny_run(tmp_path)
    run.section = "served"
    served.add_figures(run, "colocated/row", fast, GREEDY, ServedBound(0.004, 0.004, 2000.0))
    served.add_ratios(run, "colocated", {GREEDY: fast, SAMPLED: slow}, {GREEDY: slow})
    served.add_ratios(run, "vllm", {GREEDY: slow}, {GREEDY: slow})
    found = {row.name.removeprefix("gpu/served/colocated/"): row for row in run.rows}
    assert {name: row.value for name, row in found.items()} == {
        "row/ttft": pytest.approx(10.0),
        "row/tpot": pytest.approx(5.0),
        "row/longest_gap": pytest.approx(20.0),
        "row/tokens": 1000.0,
        "128_128_c8/tokens_of_vllm": 2.0,
        "128_128_c8/ttft_of_vllm": 0.5,
        "128_128_c8_sampled/tokens_of_greedy": 0.5,
    }
    shares = [found[f"row/{name}"].share for name in ("ttft", "tpot", "tokens")]
    assert shares == [None, pytest.approx(0.8), pytest.approx(0.5)]  # with 8 clients, prompts wait
