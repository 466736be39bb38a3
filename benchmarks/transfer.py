"""`transfer`: what a hand-off costs a client, over each transport, with real processes.

Requests are sent one at a time, each with a cold prompt of one chunk, to a narrow model of 24
layers, whose little arithmetic hides little. The overhead is the client's time to first token minus
the forward passes and minus the exposed part of the transfer: all that disaggregation adds besides
moving bytes.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from rich.console import Console

from baton.cli.views.timeline import STAGES, early_arrival_share
from baton.errors import NodeFailed
from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from baton.types import STAGED_TRANSPORTS
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import NARROW_SHAPE
from benchmarks.figures.machine_rates import measure_loopback_tcp_rate, measure_memcpy_rate
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.report import ResultRow, make_row, print_rows

HELP = "what a hand-off adds to the time to first token, over each transport"
OVERHEAD_LIMIT = 15.0  # maximum of the median, in milliseconds
EARLY_ARRIVAL_TARGET = 0.8  # share of slabs on the decode node before the last layer is computed
# Enough that the prefill node has reported the hand-off before the answer ends.
_OUTPUT_TOKENS = 16
_WARM_UP = 5  # requests
_MIN_REPORTED_SHARE = 0.9  # of answers whose timeline has the report of the hand-off
_DEADLINE = 60.0  # seconds of one request


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One measured request."""

    ttft_seconds: float  # as the client measured it
    timeline: common_pb2.Timeline  # the coordinator's account

    @property
    def overhead_seconds(self) -> float:
        report = self.timeline.handoff
        return self.ttft_seconds - report.compute_seconds - report.exposed_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        choices=(*STAGED_TRANSPORTS, "all"),
        default="all",
        help="which one (default all)",
    )
    parser.add_argument(
        "--requests", type=int, default=50, help="measured requests of each transport (default 50)"
    )
    parser.add_argument(
        "--prompt", type=int, default=512, help="tokens of each prompt, in one chunk (default 512)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")


async def measure_transports(
    options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    tcp = measure_loopback_tcp_rate()
    rates = {"shm": measure_memcpy_rate(), "zmq": tcp, "grpc": tcp}
    rows = [
        make_row("transfer/memcpy", rates["shm"] / 1e9, "GB/s", command),
        make_row("transfer/loopback_tcp", tcp / 1e9, "GB/s", command),
    ]
    for transport in STAGED_TRANSPORTS if options.transport == "all" else (options.transport,):
        samples = await _measure_transport(transport, options, console)
        rows += to_rows(transport, samples, rates[transport], command)
    return rows


async def _measure_transport(
    transport: str, options: argparse.Namespace, console: Console
) -> list[TransferSample]:
    """Measure one transport. Raises NodeFailed if the hand-offs did not use `transport`."""
    settings = {"transport": transport, "max_batched_tokens": options.prompt, "kv_memory": "256MiB"}
    random_source = random.Random(options.seed)
    async with start_local_cluster(console, NARROW_SHAPE, "narrow", **settings) as cluster:
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            samples = [
                await _measure_request(stub, random_source, options.prompt)
                for _ in range(_WARM_UP + options.requests)
            ]
        reported = [sample for sample in samples[_WARM_UP:] if sample.timeline.handoff.transport]
        others = {sample.timeline.handoff.transport for sample in reported} - {transport}
        if others or len(reported) < _MIN_REPORTED_SHARE * options.requests:
            raise NodeFailed(
                f"{len(reported)} of {options.requests} answers told of a hand-off, "
                f"over {others or transport}: {transport} was asked for"
            )
    return reported


async def _measure_request(
    stub: generation_pb2_grpc.GenerationStub, random_source: random.Random, prompt_tokens: int
) -> TransferSample:
    prompt = [random_source.randrange(16, NARROW_SHAPE.vocabulary) for _ in range(prompt_tokens)]
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        max_tokens=_OUTPUT_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    first = None
    started = time.perf_counter()
    async for answer in stub.Generate(request, timeout=_DEADLINE):
        if first is None and answer.token_ids:
            first = time.perf_counter()
    if first is None:
        raise NodeFailed("an answer had no tokens")
    return TransferSample(first - started, answer.timeline)


def to_rows(
    transport: str, samples: Sequence[TransferSample], rate: float, command: str
) -> list[ResultRow]:
    """Return medians. The limit of the exposed transfer is a bare copy of the same bytes at `rate`.

    `rate` is in bytes per second.
    """
    reports = [sample.timeline.handoff for sample in samples]
    prefix = f"transfer/{transport}"

    def median(
        name: str, values: Sequence[float], unit: str = "ms", limit: float | None = None
    ) -> ResultRow:
        scale = 1e3 if unit == "ms" else 1.0
        return make_row(f"{prefix}/{name}", percentile(values, 50) * scale, unit, command, limit)

    moved = [float(report.bytes) for report in reports]
    bare_copy = percentile(moved, 50) / rate * 1e3
    overheads = [sample.overhead_seconds for sample in samples]
    return [
        make_row(f"{prefix}/samples", float(len(samples)), "requests", command),
        median("overhead", overheads, limit=OVERHEAD_LIMIT),
        make_row(f"{prefix}/overhead_p99", percentile(overheads, 99) * 1e3, "ms", command),
        median("ttft", [sample.ttft_seconds for sample in samples]),
        median("compute", [report.compute_seconds for report in reports]),
        median("exposed", [report.exposed_seconds for report in reports], limit=bare_copy),
        median("commit", [report.commit_seconds for report in reports]),
        *(
            median(f"stage_{stage}", [getattr(sample.timeline, stage) for sample in samples])
            for stage in STAGES
        ),
        median("client", [sample.ttft_seconds - sample.timeline.ttft for sample in samples]),
        median(
            "landed_early",
            [early_arrival_share(report) for report in reports],
            "share",
            EARLY_ARRIVAL_TARGET,
        ),
        median("moved", [value / 1e6 for value in moved], "MB"),
        median("slabs", [float(report.slabs) for report in reports], "slabs"),
    ]


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = asyncio.run(measure_transports(options, console, command))
    print_rows(console, "transfer: medians", rows)
    return rows
