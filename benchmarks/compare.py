"""`compare`: mode auto against both fixed modes, or any endpoints against each other.

All systems have the same number of nodes. Three workloads arrive as Poisson processes, with the
same requests at the same moments for every system: short chats; a mix in which every eighth prompt
has 2,048 tokens; long prompts. A load of 1 is one request in the time that one takes when it is
alone. What is good is fixed before any load runs: twice the time to first token and twice the time
per token that the better fixed system needs for a prompt of that length when it is idle. The order
of the systems rotates from round to round. Figures are medians over the rounds, with the greatest
difference between rounds.

Printed at the end: the goodput of each system, that of auto over the better fixed mode, and where
disaggregation loses.

With --url, running systems are compared. Systems whose model, dtype or quantisation differ are
refused.
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

from baton.config.resolve import read_secret
from baton.pb import cluster_pb2, cluster_pb2_grpc
from baton.slo import Slo
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import DEMO_SHAPE
from benchmarks.figures.report import ResultRow
from benchmarks.load import endpoint_model as identity
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import HttpError, parse_url
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest, PoissonArrivals
from benchmarks.load.run_load import run_load
from benchmarks.scenarios import comparison
from benchmarks.scenarios import comparison_report as report
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
_GRACE_SECONDS = 30.0  # after the last arrival; requests that still run then are not good
_LOCAL_PREFILL_LABEL = 'way="local"'


@dataclass(slots=True)
class ComparedSystem:
    """A system under comparison."""

    name: str
    client: CompletionsClient
    grpc_endpoint: str = ""  # known only of clusters that were started for this run
    idle_latencies: dict[int, IdleLatency] = field(default_factory=dict)  # by prompt length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_system_arguments(parser)
    _add_load_arguments(parser)


def _add_system_arguments(parser: argparse.ArgumentParser) -> None:
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


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    names = [workload.name for workload in COMPARISON_WORKLOADS]
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
    """Run the comparison. Raises ValueError for bad options and for systems that do not compare."""
    workloads, loads = parse_workloads(options.workloads), parse_loads(options.loads)
    if options.rounds < 1 or options.idle < 1 or options.seconds <= 0:
        raise ValueError("--rounds and --idle must be 1 or more, --seconds above 0")
    seed = options.seed or secrets.token_hex(8)
    console.print(f"seed {seed}")
    async with contextlib.AsyncExitStack() as stack:
        systems = await _reach_systems(options, console, stack)
        if options.of not in [system.name for system in systems]:
            raise ValueError(
                f"--of {options.of}: the systems are {', '.join(system.name for system in systems)}"
            )
        for system in systems:
            system.idle_latencies = await _measure_idle(
                system.client, workloads, options.idle, f"{seed}/{system.name}"
            )
        fixed = [system.name for system in systems if system.name != options.of]
        idle = comparison.best_idle_latency(
            {system.name: system.idle_latencies for system in systems}, fixed
        )
        bounds = comparison.slos_by_length(idle)
        idle_by_system = {system.name: system.idle_latencies for system in systems}
        console.print(report.idle_table(idle_by_system, bounds))
        results, local = await _measure_goodput(
            systems, workloads, loads, options, seed, idle, bounds
        )
    console.print(report.goodput_table(results))
    for line in report.describe_results(results, workloads, options.of):
        console.print(line)
    return report.to_rows(results, local, bounds, workloads, options.of, command)


def parse_workloads(names: str) -> list[ComparisonWorkload]:
    """Return the named workloads. Raises ValueError for an unknown name."""
    known = {workload.name: workload for workload in COMPARISON_WORKLOADS}
    chosen = [name for name in names.split(",") if name]
    if not chosen or not set(chosen) <= known.keys():
        raise ValueError(f"--workloads {names!r}: there are {', '.join(known)}")
    return [known[name] for name in chosen]


def parse_loads(text: str) -> list[float]:
    """Return the loads. Raises ValueError unless all are above 0."""
    loads = [float(word) for word in text.split(",") if word]
    if not loads or min(loads) <= 0:
        raise ValueError(f"--loads {text!r}: numbers above 0, separated by commas")
    return loads


def parse_systems(words: Sequence[str]) -> dict[str, str]:
    """Return URLs by name from NAME=URL words. Raises ValueError."""
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
    """Return the declared dtype and quantization. Raises ValueError for other names."""
    found = dict(word.partition("=")[::2] for word in words)
    if not found.keys() <= {"dtype", "quantization"} or not all(found.values()):
        raise ValueError("--declare takes dtype=... and quantization=...")
    return found


async def _reach_systems(
    options: argparse.Namespace, console: Console, stack: contextlib.AsyncExitStack
) -> list[ComparedSystem]:
    """Return clients of all systems, which are reachable, warm, and serve the same model."""
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
    """Start a cluster in each mode; yield its name and its HTTP and gRPC addresses."""
    nodes = options.prefill + options.decode
    if options.prefill < 1 or options.decode < 1:
        raise ValueError("--prefill and --decode must be 1 or more: colocated has their sum")
    split = {"prefill": options.prefill, "decode": options.decode}
    settings = {
        DISAGGREGATED: {**split, "mode": DISAGGREGATED},
        COLOCATED: {"prefill": 0, "decode": nodes, "mode": COLOCATED},
        AUTO: {**split, "mode": AUTO},
    }
    for name, mode_settings in settings.items():
        cluster = start_local_cluster(
            console,
            DEMO_SHAPE,
            "demo",
            threads=options.threads,
            kv_memory="256MiB",
            **mode_settings,
        )
        endpoints = (await stack.enter_async_context(cluster)).endpoints
        yield name, f"http://{endpoints.http}", endpoints.grpc


async def _measure_idle(
    client: CompletionsClient, workloads: Sequence[ComparisonWorkload], count: int, seed: str
) -> dict[int, IdleLatency]:
    """Measure requests one at a time. The first of each length is not counted."""
    outputs = {
        length: workload.output_tokens
        for workload in workloads
        for length in workload.prompt_lengths
    }
    latencies: dict[int, IdleLatency] = {}
    for length, output_tokens in outputs.items():
        measurements: list[RequestMeasurement] = []
        for number in range(count + 1):
            request = PlannedRequest(
                0.0, length, output_tokens, seed=number, salt=f"{seed}/idle/{length}"
            )
            measurements.append(await client.measure_request(request, time.perf_counter()))
        latencies[length] = comparison.idle_latency(measurements[1:])
    return latencies


async def _measure_goodput(
    systems: Sequence[ComparedSystem],
    workloads: Sequence[ComparisonWorkload],
    loads: Sequence[float],
    options: argparse.Namespace,
    seed: str,
    idle: dict[int, IdleLatency],
    bounds: dict[int, Slo],
) -> tuple[GoodputBySystem, dict[ComparisonCell, float]]:
    """Measure the goodput of every cell and system.

    Also returns, by cell, the share of prompts that the decode nodes of the system `--of` computed.
    """
    goodputs: dict[str, dict[ComparisonCell, list[float]]] = {
        compared.name: defaultdict(list) for compared in systems
    }
    local_shares: dict[ComparisonCell, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        offset = number % len(systems)
        for workload in workloads:
            for load in loads:
                cell = ComparisonCell(workload.name, load)
                rate = comparison.arrival_rate(workload, load, idle)
                plan = comparison.plan_arrivals(
                    workload, rate, options.seconds, f"{seed}/{cell}/{number}"
                )
                for system in [*systems[offset:], *systems[:offset]]:
                    before = await _placement_counts(system)
                    measurements = await run_load(
                        system.client, PoissonArrivals(rate), plan, options.seconds + _GRACE_SECONDS
                    )
                    goodputs[system.name][cell].append(
                        comparison.compute_goodput(measurements, bounds, options.seconds)
                    )
                    if system.name == options.of and before:
                        local_shares[cell].append(
                            _local_share(before, await _placement_counts(system))
                        )
    results = {
        name: {cell: GoodputRounds(tuple(rounds)) for cell, rounds in cells.items()}
        for name, cells in goodputs.items()
    }
    return results, {cell: sum(rounds) / len(rounds) for cell, rounds in local_shares.items()}


async def _placement_counts(system: ComparedSystem) -> dict[str, float]:
    """Return attempts so far by prefill site; empty for a system without a known gRPC endpoint."""
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
    """Return the share of placements since `before` whose prompt a decode node computes."""
    new_counts = {name: value - before.get(name, 0.0) for name, value in after.items()}
    total = sum(new_counts.values())
    return (
        sum(value for name, value in new_counts.items() if _LOCAL_PREFILL_LABEL in name) / total
        if total
        else 0.0
    )
