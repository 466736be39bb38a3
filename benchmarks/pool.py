"""`pool`: the shared pool's index, what a pooled prefix saves, and the eviction policies.

The policies are measured by replaying a trace; without `--trace` they are not measured, because no
synthetic load stands in for a real one.
"""

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.kv.blocks import BlockHash
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.report import ResultRow, make_row, print_rows
from benchmarks.load.traces import read_trace
from benchmarks.scenarios.concurrency_sweep import check_plot_path
from benchmarks.scenarios.pool_replay import (
    POLICIES,
    HitRatios,
    TracePrompts,
    compute_partial_gain,
    replay_belady,
    replay_policy,
)
from benchmarks.scenarios.pool_reuse import PROMPT_TOKENS as REUSE_PROMPT
from benchmarks.scenarios.pool_reuse import measure_reuse
from kv_pool.core.blocks.attachments import PoolClientId
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.cost_evictor import CostEvictor
from kv_pool.core.index.radix_index import PromptChain

HELP = "the shared pool: its index, what it saves, and its eviction policies on a trace"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 128 * 1024
MATCH_LIMIT = 1.0  # maximum, in milliseconds
HASH_LIMIT = 20e6  # minimum, in tokens per second
CAPACITIES = (  # blocks; 0: no limit
    1_000,
    2_000,
    3_000,
    5_000,
    10_000,
    20_000,
    30_000,
    50_000,
    100_000,
    0,
)
_ROOT = BlockHash(bytes(32))
_HOLDER = PoolClientId("bench")
_ROUNDS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="in the index (default 1000000)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of a cold and a warm prompt on running nodes (default 3; 0: none)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests with hash_ids, as Mooncake's"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="only the first so many requests of it"
    )
    parser.add_argument(
        "--capacities", type=_capacities, default=CAPACITIES, help="in blocks, 0: no limit"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="hit ratio over capacity, .svg or .png"
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    if options.plot:
        check_plot_path(options.plot)
    prompts = _load_trace_prompts(options)
    rows = measure_index(options.blocks, command)
    print_rows(console, f"index of {options.blocks:,} blocks of {BLOCK_TOKENS} tokens", rows)
    if options.rounds:
        reused = asyncio.run(measure_reuse(console, options.rounds, command))
        print_rows(
            console, f"prompts of {REUSE_PROMPT:,} tokens on two nodes, 24 layers, bfloat16", reused
        )
        rows += reused
    if prompts is None:
        console.print(
            "[bold]SKIPPED: no trace was replayed, and nothing is known of eviction: "
            "give --trace FILE[/bold]"
        )
        return rows
    results = {capacity: _replay_all(prompts, capacity) for capacity in options.capacities}
    console.print(hit_table(prompts, results))
    if options.plot:
        plot_hits(prompts, results, options.plot)
    return [*rows, *_trace_rows(results, command), *_partial_rows(options, console, command)]


def _capacities(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _load_trace_prompts(options: argparse.Namespace) -> TracePrompts | None:
    if options.trace is None:
        return None
    trace = read_trace(options.trace, options.limit)
    if not all(request.block_ids for request in trace):
        raise ValueError(
            f"trace {options.trace} has requests without hash_ids: "
            "nothing is known of what they share"
        )
    return TracePrompts(trace)


# the index


def measure_index(blocks: int, command: str) -> list[ResultRow]:
    depth = min(PROMPT_TOKENS // BLOCK_TOKENS, blocks)
    tokens = [random.Random(0).randrange(1 << 17) for _ in range(depth * BLOCK_TOKENS)]
    hashing = _best_seconds(lambda: PromptChain.from_tokens(_ROOT, tokens, BLOCK_TOKENS))
    before = _resident_bytes()
    pool = SharedBlockPool(CacheTier(blocks, BLOCK_TOKENS, CostEvictor(blocks, BLOCK_TOKENS)))
    pool.attachments.attach_client(_HOLDER, 0.0)
    _fill(pool, blocks, depth, tokens)
    size = (_resident_bytes() - before) / blocks
    prompt = PromptChain.from_tokens(_ROOT, tokens, BLOCK_TOKENS)
    matching = [_timed(lambda: _look_up(pool, prompt)) for _ in range(_ROUNDS)]
    return [
        make_row("pool/hash", len(tokens) / hashing, "tokens/s", command, HASH_LIMIT),
        make_row(
            "pool/match_and_pin_p50", percentile(matching, 50) * 1e3, "ms", command, MATCH_LIMIT
        ),
        make_row("pool/match_and_pin_best", min(matching) * 1e3, "ms", command, MATCH_LIMIT),
        make_row("pool/index_bytes", size, "bytes/block", command),
    ]


def _fill(pool: SharedBlockPool, blocks: int, depth: int, tokens: Sequence[int]) -> None:
    """Publish prompts of `depth` blocks: `tokens`, and others with a different first token."""
    for number in range(blocks // depth):
        prompt = PromptChain.from_tokens(_ROOT, [tokens[0] + number, *tokens[1:]], BLOCK_TOKENS)
        granted = pool.reserve_blocks(_HOLDER, prompt, 0, float(number))
        assert granted.publication_id is not None
        sealed = pool.seal_publication(
            _HOLDER, granted.publication_id, len(granted.blocks), float(number)
        )
        assert sealed.pin_id is not None
        pool.release_pin(_HOLDER, sealed.pin_id)


def _look_up(pool: SharedBlockPool, prompt: PromptChain) -> None:
    found = pool.find_prefix(_HOLDER, prompt, len(prompt) * BLOCK_TOKENS, 1e6)
    assert found.pin_id is not None
    assert len(found.blocks) == len(prompt)
    pool.release_pin(_HOLDER, found.pin_id)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _best_seconds(function: Callable[[], object]) -> float:
    return min(_timed(function) for _ in range(_ROUNDS))


# the trace


def _replay_all(prompts: TracePrompts, capacity: int) -> dict[str, HitRatios]:
    blocks = capacity or prompts.distinct_block_count
    return {policy: replay_policy(prompts, blocks, policy) for policy in POLICIES} | {
        "belady": replay_belady(prompts, blocks)
    }


def hit_table(prompts: TracePrompts, results: dict[int, dict[str, HitRatios]]) -> Table:
    title = (
        f"{len(prompts.prompts):,} requests, {prompts.block_count:,} blocks, "
        f"{prompts.distinct_block_count:,} different ones"
    )
    table = Table("capacity", title=title, title_justify="left", box=None, header_style="bold")
    for heading in (*POLICIES, "belady"):
        table.add_column(f"{heading}: hits", justify="right")
        table.add_column("computing saved", justify="right")
    for capacity, by_policy in results.items():
        figures = (
            f"{value:.4f}"
            for hits in by_policy.values()
            for value in (hits.block_hit_ratio, hits.saved_cost_share)
        )
        table.add_row(f"{capacity:,}" if capacity else "no limit", *figures)
    return table


def _trace_rows(results: dict[int, dict[str, HitRatios]], command: str) -> list[ResultRow]:
    rows: list[ResultRow] = []
    for capacity, by_policy in results.items():
        best = by_policy["belady"].block_hit_ratio
        for policy in POLICIES:
            name = f"pool/{policy}/{capacity or 'unlimited'}/hit_ratio"
            rows.append(
                make_row(name, by_policy[policy].block_hit_ratio, "of blocks", command, best)
            )
    return rows


def _partial_rows(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    in_blocks, beyond = compute_partial_gain(read_trace(options.trace, options.limit), BLOCK_TOKENS)
    rows = [
        make_row(
            f"pool/trace/finer_blocks_of_{BLOCK_TOKENS}",
            in_blocks,
            "of prompt tokens, at most",
            command,
        ),
        make_row("pool/trace/copy_on_write", beyond, "of prompt tokens, at most", command),
    ]
    print_rows(console, "what partly matching blocks can add", rows)
    return rows


def plot_hits(prompts: TracePrompts, results: dict[int, dict[str, HitRatios]], path: Path) -> None:
    """Plot hit ratio over capacity (logarithmic).

    Unlimited capacity stands where all distinct blocks fit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    blocks = [capacity or prompts.distinct_block_count for capacity in results]
    for policy, style in (("belady", "--"), ("cost", "o-"), ("lru", "s-")):
        label = "Belady's optimum" if policy == "belady" else policy
        axes.plot(
            blocks,
            [by_policy[policy].block_hit_ratio for by_policy in results.values()],
            style,
            label=label,
        )
    axes.set_xscale("log")
    axes.set(xlabel="capacity, blocks of 512 tokens", ylabel="hit ratio", ylim=(0, None))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
