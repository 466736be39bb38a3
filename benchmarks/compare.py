"""`compare`: mode auto against both fixed modes, on the same number of nodes, or any endpoints
against each other.

Three workloads arrive as Poisson processes, with the same requests at the same moments for every
system: short chats; a mix in which every eighth prompt has 2,048 tokens; long prompts. A load of 1
is one request in the time that one takes when it is alone. What is good is fixed before any load
runs: twice the time to first token and twice the time per token that the better of the fixed
systems needs for a prompt of that length when it is idle. Systems take turns in every round;
figures are medians over rounds, beside the greatest difference between rounds.

Printed at the end: the goodput of each, that of auto over the better fixed mode, and where
disaggregation loses.

With --url, systems that run already are compared. It refuses models, dtypes or quantisations that
are not equal.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from rich.console import Console
from rich.table import Table

from baton.config.resolve import read_secret
from baton.pb import cluster_pb2, cluster_pb2_grpc
from baton.slo import Slo
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import DEMO_SHAPE
from benchmarks.figures.report import ResultRow, make_row
from benchmarks.load import endpoint_model as identity
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import HttpError, parse_url
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest, PoissonArrivals
from benchmarks.load.run_load import run_load
from benchmarks.scenarios import comparison
from benchmarks.scenarios.comparison import (
    AUTO,
    COLOCATED,
    COMPARISON_WORKLOADS,
    DISAGGREGATED,
    ComparisonCell,
    ComparisonWorkload,
    GoodputBySystem,
    GoodputRounds,
    IdleLatency,
)

HELP = "mode auto against both fixed modes, or endpoints against each other"
_GRACE_SECONDS = 30.0  # seconds after the last arrival; what runs then was not good
_LOCAL_PREFILL_LABEL = 'way="local"'


@dataclass(slots=True)
class ComparedSystem:
    """One of those compared. `grpc_endpoint` is known of clusters that were started for the run."""

    name: str
    client: CompletionsClient
    grpc_endpoint: str = ""
    idle_latencies: dict[int, IdleLatency] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="a system that runs; twice"
    )
    parser.add_argument(
        "--of", default=AUTO, help="the system that is held against the best of the others (auto)"
    )
    parser.add_argument("--model", default="", help="may be left out where endpoints serve one")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("BATON_API_KEY", ""),
        help="KEY or @FILE (BATON_API_KEY)",
    )
    parser.add_argument(
        "--declare",
        action="append",
        default=[],
        metavar="dtype=D",
        help="dtype= or quantization= of endpoints that do not say it",
    )
    parser.add_argument(
        "--prefill", type=int, default=1, help="prefill nodes; colocated has as many in all (1)"
    )
    parser.add_argument("--decode", type=int, default=1, help="decode nodes (1)")
    parser.add_argument("--threads", default="auto", help="of each node (auto)")
    names = [one.name for one in COMPARISON_WORKLOADS]
    parser.add_argument(
        "--workloads", default=",".join(names), help=f"of these (default {','.join(names)})"
    )
    parser.add_argument(
        "--loads", default="0.5,1,2", help="requests in the time of one that is alone (0.5,1,2)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in a cell (20)")
    parser.add_argument("--rounds", type=int, default=3, help="of every cell (3)")
    parser.add_argument("--idle", type=int, default=7, help="requests alone, of each length (7)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds of a request at most (60)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=1000, help="prompts use ids below this (1000)"
    )
    parser.add_argument("--seed", default="", help="fixes arrivals and prompts; fresh by default")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    return asyncio.run(compare_systems(options, console, command))


async def compare_systems(
    options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    """Raises ValueError for options that make no sense, and for systems that do not compare."""
    workloads, loads = parse_workloads(options.workloads), parse_loads(options.loads)
    if options.rounds < 1 or options.idle < 1 or options.seconds <= 0:
        raise ValueError("--rounds and --idle must be 1 or more, --seconds above 0")
    seed = options.seed or secrets.token_hex(8)
    console.print(f"seed {seed}")
    async with contextlib.AsyncExitStack() as stack:
        systems = await _reach_systems(options, console, stack)
        if options.of not in [one.name for one in systems]:
            raise ValueError(
                f"--of {options.of}: the systems are {', '.join(one.name for one in systems)}"
            )
        for one in systems:
            one.idle_latencies = await _measure_idle(
                one.client, workloads, options.idle, f"{seed}/{one.name}"
            )
        fixed = [one.name for one in systems if one.name != options.of]
        idle = comparison.best_idle_latency(
            {one.name: one.idle_latencies for one in systems}, fixed
        )
        bounds = comparison.slos_by_length(idle)
        print_idle(console, systems, bounds)
        results, local = await _measure_goodput(
            systems, workloads, loads, options, seed, idle, bounds
        )
    console.print(goodput_table(results))
    for line in describe_results(results, workloads, options.of):
        console.print(line)
    return to_rows(results, local, bounds, workloads, options.of, command)


def parse_workloads(names: str) -> list[ComparisonWorkload]:
    """Raises ValueError."""
    known = {one.name: one for one in COMPARISON_WORKLOADS}
    wanted = [name for name in names.split(",") if name]
    if not wanted or not set(wanted) <= known.keys():
        raise ValueError(f"--workloads {names!r}: there are {', '.join(known)}")
    return [known[name] for name in wanted]


def parse_loads(text: str) -> list[float]:
    """Raises ValueError."""
    loads = [float(word) for word in text.split(",") if word]
    if not loads or min(loads) <= 0:
        raise ValueError(f"--loads {text!r}: numbers above 0, separated by commas")
    return loads


def parse_systems(words: Sequence[str]) -> dict[str, str]:
    """NAME=URL each. Raises ValueError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not (name and equals and url) or name in found:
            raise ValueError(f"--url {word!r} is not NAME=URL with a name of its own")
        found[name] = url
    if len(found) == 1:
        raise ValueError("one --url alone has nothing to be compared with: give two or more")
    return found


def parse_declared(words: Sequence[str]) -> dict[str, str]:
    """Raises ValueError."""
    found = dict(word.partition("=")[::2] for word in words)
    if not found.keys() <= {"dtype", "quantization"} or not all(found.values()):
        raise ValueError("--declare takes dtype=... and quantization=...")
    return found


async def _reach_systems(
    options: argparse.Namespace, console: Console, stack: contextlib.AsyncExitStack
) -> list[ComparedSystem]:
    """Reached, equal in what they serve, and warm."""
    key = read_secret(options.api_key, "api_key")
    declared, urls = parse_declared(options.declare), parse_systems(options.url)
    channels: dict[str, str] = {}
    if not urls:
        async for name, http, channel in _start_clusters(options, console, stack):
            urls[name], channels[name] = http, channel
    systems: list[ComparedSystem] = []
    served: dict[str, identity.EndpointModel] = {}
    for name, url in urls.items():
        target = parse_url(url)
        served[name] = await identity.fetch_endpoint_model(target, key, options.model, declared)
        client = CompletionsClient(target, options.model, key, options.vocabulary, options.timeout)
        try:
            client = await client.probe_features()
        except (OSError, HttpError) as error:
            raise ValueError(f"{url} cannot be reached: {error}") from None
        systems.append(ComparedSystem(name, client, channels.get(name, "")))
        console.print(f"{name}: {url}, {served[name]}")
    identity.require_same_model(served)
    return systems


async def _start_clusters(
    options: argparse.Namespace, console: Console, stack: contextlib.AsyncExitStack
) -> AsyncIterator[tuple[str, str, str]]:
    """Name, HTTP and gRPC of a cluster in each mode, all with as many nodes."""
    nodes = options.prefill + options.decode
    if options.prefill < 1 or options.decode < 1:
        raise ValueError("--prefill and --decode must be 1 or more: colocated has their sum")
    split = {"prefill": options.prefill, "decode": options.decode}
    settings = {
        DISAGGREGATED: {**split, "mode": DISAGGREGATED},
        COLOCATED: {"prefill": 0, "decode": nodes, "mode": COLOCATED},
        AUTO: {**split, "mode": AUTO},
    }
    for name, own in settings.items():
        made = start_local_cluster(
            console, DEMO_SHAPE, "demo", threads=options.threads, kv_memory="256MiB", **own
        )
        where = (await stack.enter_async_context(made)).endpoints
        yield name, f"http://{where.http}", where.grpc


async def _measure_idle(
    client: CompletionsClient, workloads: Sequence[ComparisonWorkload], count: int, seed: str
) -> dict[int, IdleLatency]:
    """One request after another. The first of each length is not counted."""
    outputs = {
        length: workload.output_tokens
        for workload in workloads
        for length in workload.prompt_lengths
    }
    found: dict[int, IdleLatency] = {}
    for length, output in outputs.items():
        seen: list[RequestMeasurement] = []
        for number in range(count + 1):
            request = PlannedRequest(0.0, length, output, seed=number, salt=f"{seed}/idle/{length}")
            seen.append(await client.measure_request(request, time.perf_counter()))
        found[length] = comparison.idle_latency(seen[1:])
    return found


async def _measure_goodput(
    systems: Sequence[ComparedSystem],
    workloads: Sequence[ComparisonWorkload],
    loads: Sequence[float],
    options: argparse.Namespace,
    seed: str,
    idle: dict[int, IdleLatency],
    bounds: dict[int, Slo],
) -> tuple[GoodputBySystem, dict[ComparisonCell, float]]:
    """Also the share of prompts that decode nodes computed, of the system in question."""
    seen: dict[str, dict[ComparisonCell, list[float]]] = {
        one.name: defaultdict(list) for one in systems
    }
    local: dict[ComparisonCell, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        turn = number % len(systems)
        for workload in workloads:
            for load in loads:
                cell, rate = (
                    ComparisonCell(workload.name, load),
                    comparison.arrival_rate(workload, load, idle),
                )
                plan = comparison.plan_arrivals(
                    workload, rate, options.seconds, f"{seed}/{cell}/{number}"
                )
                for system in [*systems[turn:], *systems[:turn]]:
                    before = await _placement_counts(system)
                    sent = await run_load(
                        system.client, PoissonArrivals(rate), plan, options.seconds + _GRACE_SECONDS
                    )
                    seen[system.name][cell].append(
                        comparison.compute_goodput(sent, bounds, options.seconds)
                    )
                    if system.name == options.of and before:
                        local[cell].append(_local_share(before, await _placement_counts(system)))
    results = {
        name: {cell: GoodputRounds(tuple(each)) for cell, each in cells.items()}
        for name, cells in seen.items()
    }
    return results, {cell: sum(each) / len(each) for cell, each in local.items()}


async def _placement_counts(system: ComparedSystem) -> dict[str, float]:
    """Attempts so far, by who computed the prompt; empty where nobody tells."""
    if not system.grpc_endpoint:
        return {}
    async with grpc.aio.insecure_channel(system.grpc_endpoint) as channel:
        status = await cluster_pb2_grpc.ClusterStub(channel).Status(cluster_pb2.StatusRequest())
    return {
        name: value
        for name, value in status.counters.items()
        if name.startswith("baton_placements_total{")
    }


def _local_share(before: dict[str, float], after: dict[str, float]) -> float:
    fresh = {name: value - before.get(name, 0.0) for name, value in after.items()}
    total = sum(fresh.values())
    return (
        sum(value for name, value in fresh.items() if _LOCAL_PREFILL_LABEL in name) / total
        if total
        else 0.0
    )


# what is shown


def print_idle(console: Console, systems: Sequence[ComparedSystem], bounds: dict[int, Slo]) -> None:
    shown = Table(
        title="idle: TTFT and TPOT, milliseconds",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    shown.add_column("prompt", justify="right")
    for one in systems:
        shown.add_column(one.name, justify="right")
    shown.add_column("good is within", justify="right")
    for length, bound in bounds.items():
        figures = [
            f"{one.idle_latencies[length].ttft * 1e3:.1f}, {one.idle_latencies[length].tpot * 1e3:.2f}"
            for one in systems
        ]
        limits = f"{(bound.ttft_seconds or 0) * 1e3:.1f}, {(bound.tpot_seconds or 0) * 1e3:.2f}"
        shown.add_row(str(length), *figures, limits)
    console.print(shown)


def goodput_table(results: GoodputBySystem) -> Table:
    shown = Table(
        title="goodput, requests/s: median (difference between rounds)",
        title_justify="left",
        box=None,
        header_style="bold",
    )
    shown.add_column("workload/load")
    for name in results:
        shown.add_column(name, justify="right")
    for cell in next(iter(results.values())):
        figures = [
            f"{results[name][cell].median:.2f} ({results[name][cell].spread:.0%})"
            for name in results
        ]
        shown.add_row(str(cell), *figures)
    return shown


def describe_results(
    results: GoodputBySystem, workloads: Sequence[ComparisonWorkload], of: str
) -> list[str]:
    """In words: that of one system over the best of the others, and where disaggregation loses."""
    lines = []
    for workload in workloads:
        peaks = {name: comparison.peak_goodput(results, name, workload.name) for name in results}
        best = max((name for name in results if name != of), key=lambda name: peaks[name])
        lines.append(
            f"{workload.name}: {of} has {comparison.share_of_best_other(results, of, peaks):.2f} of the peak goodput of {best}"
            f" ({peaks[of]:.2f} of {peaks[best]:.2f} requests/s)"
        )
    if {DISAGGREGATED, COLOCATED} <= results.keys():
        lost = [
            f"{cell} ({share:.0%} of {COLOCATED})"
            for cell, share in comparison.losing_cells(results, DISAGGREGATED, COLOCATED)
        ]
        lines.append(f"disaggregation loses at: {', '.join(lost) or 'none of these loads'}")
    return lines


def to_rows(
    results: GoodputBySystem,
    local: dict[ComparisonCell, float],
    bounds: dict[int, Slo],
    workloads: Sequence[ComparisonWorkload],
    of: str,
    command: str,
) -> list[ResultRow]:
    rows = []
    for length, bound in bounds.items():
        rows.append(
            make_row(f"compare/slo/{length}/ttft", (bound.ttft_seconds or 0.0) * 1e3, "ms", command)
        )
        rows.append(
            make_row(f"compare/slo/{length}/tpot", (bound.tpot_seconds or 0.0) * 1e3, "ms", command)
        )
    for name, cells in results.items():
        for cell, one in cells.items():
            rows.append(
                make_row(f"compare/{cell}/{name}/goodput", one.median, "requests/s", command)
            )
            rows.append(
                make_row(f"compare/{cell}/{name}/spread", one.spread, "of the median", command)
            )
    for cell in next(iter(results.values())):
        share = comparison.share_of_best_other(
            results, of, {name: results[name][cell].median for name in results}
        )
        rows.append(make_row(f"compare/{cell}/{of}_of_best", share, "x", command))
        if cell in local:
            rows.append(make_row(f"compare/{cell}/{of}_local", local[cell], "of prompts", command))
    for workload in workloads:
        peaks = {name: comparison.peak_goodput(results, name, workload.name) for name in results}
        rows.append(
            make_row(
                f"compare/{workload.name}/{of}_of_best",
                comparison.share_of_best_other(results, of, peaks),
                "x",
                command,
            )
        )
    return rows
