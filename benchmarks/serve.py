"""`serve`: latency and throughput of any OpenAI-compatible endpoint, cell by cell.

A cell is one load (a closed loop of N clients, or Poisson arrivals) over drawn lengths, or a
recorded trace. Every cell sends new prompts, so that no cache helps; the prompts of a trace share
among themselves exactly the prefixes that the trace states. TTFT, TPOT and ITL are measured at the
client; unless the loop is closed, they count from the time at which a request was due. A sweep is a
series of closed loops with growing concurrency, drawn as a picture.

With --server and --baton, servers are compared instead: running ones, and clusters that are started
with `baton up`'s settings. In every round each has a turn in every cell, in which the others are
paused or down; prompts are new. A cell in which other processes use the CPUs is repeated. Figures
are medians of the rounds, and so are their ratios to the servers that --of names.

With --speculative, speculative decoding is compared with none.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.config.resolve import read_secret
from baton.slo import Slo, parse_slo
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import DEMO_SHAPE
from benchmarks.figures.percentiles import PercentileSummary
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.load import request_plan as schedule
from benchmarks.load import traces
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import HttpError, parse_url
from benchmarks.load.measurement import CellResult, evaluate_cell
from benchmarks.load.run_load import LoadPattern, run_load
from benchmarks.peers import command as peers
from benchmarks.scenarios import concurrency_sweep as sweep
from benchmarks.scenarios import speculation

HELP = "latency, throughput and goodput of any OpenAI-compatible endpoint"
_WARM_UP = 2  # requests before the first cell
# Unless options say otherwise; speculation has defaults of its own.
_PROMPT, _OUTPUT, _REQUESTS = "256", "64", 64
_WAVES_PER_CLIENT = 4  # least requests of each client in a cell of a sweep

_HEADINGS = (
    *("load", "sent", "good", "errors", "TTFT", "TPOT", "ITL"),
    *("tokens/s", "requests/s", "goodput", "cached"),
)


@dataclass(frozen=True, slots=True)
class ServeCell:
    load: LoadPattern
    plan: Sequence[schedule.PlannedRequest]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_endpoint_arguments(parser)
    _add_load_arguments(parser)
    _add_trace_arguments(parser)
    _add_sweep_arguments(parser)
    peers.add_arguments(parser)
    speculation.add_arguments(parser)
    parser.add_argument(
        "--seed", default="", help="fixes lengths, arrivals and prompts; fresh by default"
    )


def _add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="", help="base URL; without it a cluster is started for the run"
    )
    parser.add_argument("--model", default="", help="may be left out when the endpoint serves one")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("BATON_API_KEY", ""),
        help="KEY or @FILE (BATON_API_KEY)",
    )


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency", default="1,4,16", help="closed loops (default 1,4,16); none if empty"
    )
    parser.add_argument("--rate", default="", help="Poisson arrivals a second, separated by commas")
    parser.add_argument(
        "--prompt",
        default="",
        help="tokens: N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MOST]"
        " (default 256; 64 with --speculative)",
    )
    parser.add_argument(
        "--output", default="", help="tokens, likewise (default 64; 256 with --speculative)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        help="requests of a cell at most (default 64; 4 with --speculative)",
    )
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="seconds of a cell at most (default 90)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds of a request at most (default 60)"
    )
    parser.add_argument(
        "--slo",
        default="ttft=500ms,tpot=50ms",
        help="what counts as good (default ttft=500ms,tpot=50ms)",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=1000,
        help="random prompts use ids below this (default 1000)",
    )


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay it: Mooncake's JSON lines, or Azure's CSV",
    )
    parser.add_argument(
        "--speed", type=float, default=1.0, help="times as fast as the trace (default 1)"
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="first requests of the trace (default 0: all)"
    )
    parser.add_argument(
        "--scale-lengths", type=float, default=1.0, help="times as long as in the trace (default 1)"
    )


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep", default="", metavar="1,2,4,...", help="closed loops, plotted on one picture"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("sweep.svg"),
        help="picture of the sweep, .svg or .png (default sweep.svg)",
    )
    parser.add_argument(
        "--ttft-slo", default="", metavar="500ms", help="print the ceiling with p90 TTFT within it"
    )


async def run_cells(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    """Run all cells. Raises ValueError for bad options or an unusable endpoint."""
    if options.server or options.baton:
        return await peers.compare_servers(options, console, command)
    if options.speculative:
        return await speculation.compare_speculation(options, console, command)
    slo = parse_slo(options.slo)
    bound = parse_slo(f"ttft={options.ttft_slo}").ttft_seconds if options.ttft_slo else None
    seed = options.seed or secrets.token_hex(8)
    if options.sweep:
        sweep.check_plot_path(options.plot)
    cells = plan_cells(options, seed)
    console.print(f"seed {seed}")
    if options.trace:
        print_trace(console, cells[0])
    rows: list[ResultRow] = []
    results: list[CellResult] = []
    async with _endpoint(options.url, console) as url:
        client = await _connect_client(options, url)
        console.print(f"{url}: {client.features}")
        for cell in cells:
            measurements = await run_load(client, cell.load, cell.plan, options.seconds)
            results.append(evaluate_cell(str(cell.load), measurements, slo))
            rows += to_rows(results[-1], slo, command)
    console.print(latency_table(results))
    if options.sweep:
        rows += _sweep_rows(options, cells, results, bound, console, command)
    return rows


def plan_cells(options: argparse.Namespace, seed: str) -> list[ServeCell]:
    """Return what each cell sends. Raises ValueError."""
    if options.trace:
        if options.sweep:
            raise ValueError(
                "--trace and --sweep exclude each other: a trace has a load of its own"
            )
        recorded = traces.read_trace(options.trace, options.limit)
        plan = traces.plan_from_trace(recorded, seed, options.speed, options.scale_lengths)
        return [ServeCell(traces.TraceReplay(options.trace.stem, options.speed), plan)]
    prompt = schedule.parse_lengths(options.prompt or _PROMPT)
    output = schedule.parse_lengths(options.output or _OUTPUT)
    cells = []
    for load in parse_loads(
        options.sweep or options.concurrency, "" if options.sweep else options.rate
    ):
        min_count = (
            _WAVES_PER_CLIENT * load.concurrency
            if options.sweep and isinstance(load, schedule.ClosedLoop)
            else 0
        )
        count = max(options.requests or _REQUESTS, min_count)
        cells.append(
            ServeCell(load, schedule.plan_requests(load, prompt, output, count, f"{seed}/{load}"))
        )
    return cells


def print_trace(console: Console, cell: ServeCell) -> None:
    prompt_tokens = sum(request.prompt_tokens for request in cell.plan)
    output_tokens = sum(request.output_tokens for request in cell.plan)
    console.print(
        f"trace: {len(cell.plan)} requests in {cell.plan[-1].start_seconds:.1f} s, "
        f"{prompt_tokens} prompt tokens "
        f"({traces.repeated_prefix_share(cell.plan):.0%} in blocks sent before), "
        f"{output_tokens} output tokens"
    )


def _sweep_rows(
    options: argparse.Namespace,
    cells: Sequence[ServeCell],
    results: Sequence[CellResult],
    bound: float | None,
    console: Console,
    command: str,
) -> list[ResultRow]:
    """Draw the sweep. With a TTFT bound, print the ceiling and return it as a row."""
    loads = [cell.load.concurrency for cell in cells if isinstance(cell.load, schedule.ClosedLoop)]
    points = [sweep.SweepPoint(load, result) for load, result in zip(loads, results, strict=True)]
    sweep.plot_sweep(
        points,
        bound,
        options.plot,
        f"prompt {options.prompt or _PROMPT}, output {options.output or _OUTPUT} tokens",
    )
    console.print(f"picture: {options.plot}")
    if bound is None:
        return []
    console.print(sweep.describe_ceiling(points, bound))
    best = sweep.find_ceiling(points, bound)
    value = best.result.tokens_per_second if best else 0.0
    return [make_row("serve/sweep/ceiling", value, "tokens/s", command)]


def parse_loads(
    concurrency: str, rate: str
) -> list[schedule.ClosedLoop | schedule.PoissonArrivals]:
    """Return closed loops, then Poisson arrivals. Raises ValueError."""
    loads: list[schedule.ClosedLoop | schedule.PoissonArrivals] = [
        schedule.ClosedLoop(int(word)) for word in concurrency.split(",") if word
    ]
    loads += [schedule.PoissonArrivals(float(word)) for word in rate.split(",") if word]
    if not loads:
        raise ValueError("there is nothing to do: give --concurrency or --rate")
    if any(
        (load.concurrency if isinstance(load, schedule.ClosedLoop) else load.requests_per_second)
        <= 0
        for load in loads
    ):
        raise ValueError("concurrency and rate must be above 0")
    return loads


@contextlib.asynccontextmanager
async def _endpoint(url: str, console: Console) -> AsyncIterator[str]:
    if url:
        yield url
        return
    async with start_local_cluster(console, DEMO_SHAPE, "demo") as cluster:
        yield f"http://{cluster.endpoints.http}"


async def _connect_client(options: argparse.Namespace, url: str) -> CompletionsClient:
    key = read_secret(options.api_key, "api_key")
    client = CompletionsClient(
        parse_url(url), options.model, key, options.vocabulary, options.timeout
    )
    try:
        client = await client.probe_features()
    except (OSError, HttpError) as error:
        raise ValueError(f"{url} cannot be reached: {error}") from None
    for number in range(_WARM_UP):
        await client.measure_request(schedule.PlannedRequest(0.0, 16, 4, seed=number), 0.0)
    return client


def to_rows(result: CellResult, slo: Slo, command: str) -> list[ResultRow]:
    """Return latencies in milliseconds, throughput and goodput.

    The p99 of TTFT and of TPOT are compared with the SLO, goodput with the request rate.
    """
    rows = []
    limits = {("ttft", "p99"): slo.ttft_seconds, ("tpot", "p99"): slo.tpot_seconds}
    for metric, summary in (("ttft", result.ttft), ("tpot", result.tpot), ("itl", result.itl)):
        if summary is None:
            continue
        for quantile in ("p50", "p90", "p99", "max"):
            limit = limits.get((metric, quantile))
            name = f"serve/{result.name}/{metric}_{quantile}"
            rows.append(
                make_row(
                    name, getattr(summary, quantile) * 1e3, "ms", command, limit and limit * 1e3
                )
            )
    rate, name = result.requests_per_second, f"serve/{result.name}"
    rows.append(make_row(f"{name}/tokens", result.tokens_per_second, "tokens/s", command))
    rows.append(make_row(f"{name}/goodput", result.goodput, "requests/s", command, rate))
    if result.cached_share is not None:
        rows.append(make_row(f"{name}/cached", result.cached_share, "of prompt tokens", command))
    rows.append(
        make_row(f"{name}/errors", float(sum(result.error_counts.values())), "requests", command)
    )
    rows.append(make_row(f"{name}/miscounted", float(result.miscounted_count), "requests", command))
    return rows


def latency_table(results: Sequence[CellResult]) -> Table:
    table = Table(
        title="milliseconds: p50 / p90 / p99 / max",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    for heading in _HEADINGS:
        table.add_column(
            heading, justify="left" if heading in ("load", "errors") else "right", no_wrap=True
        )
    for result in results:
        table.add_row(
            result.name,
            str(result.sent_count),
            str(result.good_count),
            _format_errors(result),
            *(_format_quantiles(summary) for summary in (result.ttft, result.tpot, result.itl)),
            f"{result.tokens_per_second:.1f}",
            f"{result.requests_per_second:.2f}",
            f"{result.goodput:.2f}",
            "-" if result.cached_share is None else f"{result.cached_share:.0%}",
        )
    return table


def _format_errors(result: CellResult) -> str:
    kinds = [f"{count} {kind}" for kind, count in sorted(result.error_counts.items())]
    text = ", ".join(kinds) or "-"
    if result.miscounted_count:
        text += f"; {result.miscounted_count} miscounted"
    return text


def _format_quantiles(summary: PercentileSummary | None) -> str:
    if summary is None:
        return "-"
    return " / ".join(
        f"{value * 1e3:.1f}" for value in (summary.p50, summary.p90, summary.p99, summary.max)
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    return asyncio.run(run_cells(options, console, command))
