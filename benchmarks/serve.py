"""`serve`: latency and throughput of any OpenAI-compatible endpoint, cell by cell.

A cell is one load (a closed loop of N clients, or Poisson arrivals) over drawn lengths. Every cell sends prompts that
were never sent before, so that no cache answers for the model. TTFT, TPOT and ITL are client-side; under Poisson load
they count from the moment when a request was due.
"""

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import schedule
from benchmarks.completions import Client
from benchmarks.http_stream import HttpError, parse_url
from benchmarks.load import drive
from benchmarks.local_cluster import local_cluster
from benchmarks.measurement import CellResult, evaluate
from benchmarks.models import DEMO
from benchmarks.percentiles import Summary
from benchmarks.report import Row, row
from benchmarks.slo import Slo, parse_slo

HELP = "latency, throughput and goodput of any OpenAI-compatible endpoint"
_WARM_UP = 2  # requests before the first cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="base URL; without it a cluster is started for the run")
    parser.add_argument("--model", default="", help="may be left out when the endpoint serves one")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--concurrency", default="1,4,16", help="closed loops, separated by commas; none if empty")
    parser.add_argument("--rate", default="", help="Poisson arrivals a second, separated by commas")
    parser.add_argument("--prompt", default="256", help="tokens: N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST]")
    parser.add_argument("--output", default="64", help="tokens, likewise")
    parser.add_argument("--requests", type=int, default=64, help="requests of a cell at most (default 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of a cell at most (default 60)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a request at most (default 60)")
    parser.add_argument("--slo", default="ttft=500ms,tpot=50ms", help="what counts as good")
    parser.add_argument("--vocabulary", type=int, default=1000, help="random prompts use ids below this (default 1000)")
    parser.add_argument("--seed", default="", help="fixes lengths, arrivals and prompts; fresh by default")


async def run(options: argparse.Namespace, console: Console, command: str) -> list[Row]:
    """Raises ValueError for options that make no sense or an endpoint that cannot be used."""
    loads = parse_loads(options.concurrency, options.rate)
    prompt, output = schedule.parse_lengths(options.prompt), schedule.parse_lengths(options.output)
    slo = parse_slo(options.slo)
    seed = options.seed or secrets.token_hex(8)
    console.print(f"seed {seed}")
    rows: list[Row] = []
    results: list[CellResult] = []
    async with _endpoint(options.url, console) as url:
        client = await _client(options, url)
        console.print(f"{url}: {client.dialect}")
        for load in loads:
            plan = schedule.plan(load, prompt, output, options.requests, f"{seed}/{load}")
            seen = await drive(client, load, plan, options.seconds)
            results.append(evaluate(str(load), seen, slo))
            rows += to_rows(results[-1], slo, command)
    console.print(table(results))
    return rows


def parse_loads(concurrency: str, rate: str) -> list[schedule.Load]:
    """Raises ValueError."""
    loads: list[schedule.Load] = [schedule.Closed(int(word)) for word in concurrency.split(",") if word]
    loads += [schedule.Poisson(float(word)) for word in rate.split(",") if word]
    if not loads:
        raise ValueError("there is nothing to do: give --concurrency or --rate")
    if any((one.concurrency if isinstance(one, schedule.Closed) else one.rate) <= 0 for one in loads):
        raise ValueError("concurrency and rate must be above 0")
    return loads


@contextlib.asynccontextmanager
async def _endpoint(url: str, console: Console) -> AsyncIterator[str]:
    if url:
        yield url
        return
    async with local_cluster(console, DEMO, "demo") as cluster:
        yield f"http://{cluster.endpoints.http}"


async def _client(options: argparse.Namespace, url: str) -> Client:
    client = Client(parse_url(url), options.model, options.api_key, options.vocabulary, options.timeout)
    try:
        client = await client.probe()
    except (OSError, HttpError) as error:
        raise ValueError(f"{url} cannot be reached: {error}") from None
    for number in range(_WARM_UP):
        await client.measure(schedule.Planned(0.0, 16, 4, seed=number), 0.0)
    return client


def to_rows(result: CellResult, slo: Slo, command: str) -> list[Row]:
    """Latencies in milliseconds; the p99 of TTFT and TPOT are held against the SLO, goodput against the rate."""
    rows = []
    limits = {("ttft", "p99"): slo.ttft, ("tpot", "p99"): slo.tpot}
    for metric, summary in (("ttft", result.ttft), ("tpot", result.tpot), ("itl", result.itl)):
        if summary is None:
            continue
        for quantile in ("p50", "p90", "p99", "max"):
            limit = limits.get((metric, quantile))
            name = f"serve/{result.name}/{metric}_{quantile}"
            rows.append(row(name, getattr(summary, quantile) * 1e3, "ms", command, limit and limit * 1e3))
    rate, name = result.requests_per_second, f"serve/{result.name}"
    rows.append(row(f"{name}/tokens", result.tokens_per_second, "tokens/s", command))
    rows.append(row(f"{name}/goodput", result.goodput, "requests/s", command, rate))
    rows.append(row(f"{name}/errors", float(sum(result.errors.values())), "requests", command))
    rows.append(row(f"{name}/miscounted", float(result.miscounted), "requests", command))
    return rows


def table(results: Sequence[CellResult]) -> Table:
    shown = Table(title="milliseconds: p50 / p90 / p99 / max", title_justify="left", box=None, header_style="bold")
    for heading in ("load", "sent", "good", "errors", "TTFT", "TPOT", "ITL", "tokens/s", "requests/s", "goodput"):
        shown.add_column(heading, justify="left" if heading in ("load", "errors") else "right", no_wrap=True)
    for one in results:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(one.errors.items())) or "-"
        if one.miscounted:
            errors += f"; {one.miscounted} miscounted"
        shown.add_row(
            one.name,
            str(one.sent),
            str(one.good),
            errors,
            *(_quantiles(summary) for summary in (one.ttft, one.tpot, one.itl)),
            f"{one.tokens_per_second:.1f}",
            f"{one.requests_per_second:.2f}",
            f"{one.goodput:.2f}",
        )
    return shown


def _quantiles(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    return " / ".join(f"{value * 1e3:.1f}" for value in (summary.p50, summary.p90, summary.p99, summary.max))


def main(options: argparse.Namespace, console: Console, command: str) -> list[Row]:
    return asyncio.run(run(options, console, command))
