"""The replay of traces: what policies find, against counting by hand and against each other."""

import argparse
import random
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import pool
from benchmarks.load.traces import TraceRequest
from benchmarks.scenarios.pool_replay import (
    POLICIES,
    TracePrompts,
    compute_partial_gain,
    replay_belady,
    replay_policy,
)


def recorded(at: float, *blocks: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(at, tokens or len(blocks) * 512, 10, blocks)


def conversations(seed: int, requests: int) -> list[TraceRequest]:
    """Over one system prompt: some conversations go on after a while, most do not. Ids are the
    trace's own."""
    drawn, trace, fresh = random.Random(seed), [], iter(range(1, 1 << 30))
    going: list[tuple[int, ...]] = []
    for number in range(requests):
        again = bool(going) and drawn.random() < 0.4
        before = going.pop(drawn.randrange(len(going))) if again else (0,)
        blocks = (*before, *(next(fresh) for _ in range(drawn.randrange(1, 8))))
        if again or drawn.random() < 0.3:
            going.append(blocks[:-1])
        trace.append(recorded(number * 2.0, *blocks, tokens=len(blocks) * 512 - 100))
    return trace


def test_hits_by_hand() -> None:
    work = TracePrompts([recorded(0, 1, 2), recorded(1, 1, 3), recorded(2, 1, 2), recorded(3, 9)])
    assert (work.block_count, work.distinct_block_count) == (7, 4)
    for policy in POLICIES:
        assert replay_policy(work, 100, policy).block_hit_ratio == pytest.approx(3 / 7)
    assert replay_belady(work, 100).block_hit_ratio == pytest.approx(3 / 7)
    assert replay_policy(work, 2, "lru").block_hit_ratio == pytest.approx(2 / 7), "2 made way for 3"
    assert replay_belady(work, 2).block_hit_ratio == pytest.approx(3 / 7), "3 is never used again"


@pytest.mark.slow
def test_cost_finds_no_less_than_lru_and_no_more_than_belady() -> None:
    work = TracePrompts(conversations(1, 1500))
    gained = 0.0
    for capacity in (100, 300, 1000, 3000):
        lru, cost = (
            replay_policy(work, capacity, policy).block_hit_ratio for policy in ("lru", "cost")
        )
        assert lru <= cost <= replay_belady(work, capacity).block_hit_ratio
        gained = max(gained, cost - lru)
    assert gained > 0.01, "where capacity binds it finds more"
    assert (
        replay_policy(work, work.distinct_block_count, "cost")
        == replay_policy(work, work.distinct_block_count, "lru")
        == replay_belady(work, work.distinct_block_count)
    )


def test_policies_are_deterministic() -> None:
    work = TracePrompts(conversations(2, 300))
    assert replay_policy(work, 100, "cost") == replay_policy(work, 100, "cost")


def test_a_prompt_that_does_not_fit_is_kept_in_part() -> None:
    work = TracePrompts([recorded(0, *range(10)), recorded(1, *range(10))])
    for policy in POLICIES:
        assert replay_policy(work, 4, policy).block_hit_ratio == pytest.approx(4 / 20)


def test_partial_blocks_count_where_a_prompt_goes_on_from_an_earlier_end() -> None:
    trace = [
        recorded(0, 1, 2, 3, tokens=1024 + 100),
        recorded(1, 1, 2, 4, 5, tokens=2000),
        recorded(2, 1, 9),
    ]
    tokens = sum(request.prompt_tokens for request in trace)
    assert compute_partial_gain(trace, 16) == pytest.approx((96 / tokens, 4 / tokens))


def test_bench_without_a_trace_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = pool.main(_options(), Console(width=160), "python -m benchmarks pool")
    assert "SKIPPED" in capsys.readouterr().out
    assert {one.name for one in rows} >= {"pool/hash", "pool/match_and_pin_p50", "pool/index_bytes"}


def test_bench_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f'{{"timestamp": {row.arrival_seconds * 1e3}, "input_length": {row.prompt_tokens}, '
        '"output_length": 1, '
        f'"hash_ids": {list(row.block_ids)}}}'
        for row in conversations(3, 60)
    ]
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "hits.svg"
    trace.write_text("\n".join(lines))
    options = _options("--trace", str(trace), "--capacities", "20,0", "--plot", str(picture))
    rows = {
        row.name: row for row in pool.main(options, Console(width=160), "python -m benchmarks pool")
    }
    assert rows["pool/cost/unlimited/hit_ratio"].share == pytest.approx(1)
    assert "no limit" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pool.add_arguments(parser)
    return parser.parse_args(["--blocks", "64", "--rounds", "0", *arguments])
