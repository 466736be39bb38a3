"""What the served figures are made of: rows, requests, sizes and the table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.slo import Slo
from benchmarks.device.served_rows import (
    ServedRow,
    choose_cache_bytes,
    describe_errors,
    fit_together,
    make_served_table,
    parse_rows,
)
from benchmarks.gpu import TABLE_ROWS
from benchmarks.load.measurement import RequestMeasurement, evaluate_cell
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

GREEDY, SAMPLED = ServedRow(128, 128, 8), ServedRow(128, 128, 8, is_sampled=True)


def answered(start: float, tokens: int) -> RequestMeasurement:
    """A request whose first token takes 20 ms, and each further one 5 ms."""
    found = RequestMeasurement(start, tokens, usage_tokens=tokens)
    found.token_arrivals = [(start + 0.02 + 0.005 * n, 1) for n in range(tokens)]
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
    size = make_tiny_run(tmp_path).model.size
    rows = parse_rows("128/128:1,64;2048/64:8", sampled=())
    chosen = choose_cache_bytes(rows, size)
    assert chosen % (1 << 30) == 0
    assert chosen >= 8 * (2048 + 64) * size.kv_token_bytes


def test_servers_run_together_if_the_device_holds_all() -> None:
    assert fit_together(2, 30, 60)
    assert not fit_together(3, 30, 60)


def test_table_has_a_column_for_each_system() -> None:
    result = evaluate_cell("row", [answered(0.0, 11), answered(0.1, 11)], Slo())
    empty = evaluate_cell("row", [RequestMeasurement(0.0, 4, error="http 500")], Slo())
    output = io.StringIO()
    results = {"colocated": {GREEDY: result, SAMPLED: empty}, "vllm": {GREEDY: result}}
    Console(file=output, width=160).print(make_served_table(results, {GREEDY: 1529.2}))
    lines = output.getvalue().splitlines()
    greedy = next(line for line in lines if line.strip().startswith("128_128_c8 "))
    sampled = next(line for line in lines if "128_128_c8_sampled" in line)
    assert "1,529" in greedy
    assert greedy.count("20.0 / 5.00, 129") == 2
    assert sampled.split() == ["128_128_c8_sampled", "-", "-"]
    assert describe_errors(empty) == "1 http 500"
    assert describe_errors(result) == ""
