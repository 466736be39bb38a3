"""`coordinator`: what the coordinator costs, with nodes that answer at once and compute nothing.

Coordinator, nodes and clients are separate processes, and the coordinator has its own core where
there are two. Throughput is tokens per second of the coordinator's CPU time, over 64 streams by
default, so that other load on the machine does not distort it. What the coordinator adds to the
time to first token is the client's time, one stream at a time, minus that of the same request to a
bare front end (`instant_front.py`), which measures the client itself. Both are sent in turn. The
small part of the nodes counts as the coordinator's.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import msgspec
from rich.console import Console

from baton.cli.client.health_watch import wait_until_serving
from baton.cli.supervisor import child_specs, ports
from baton.config.settings import Config
from baton.errors import NodeFailed
from baton.pb import common_pb2, generation_pb2, generation_pb2_grpc
from benchmarks.clusters.random_models import NARROW_SHAPE, build_random_model
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.process_time import cpu_seconds
from benchmarks.figures.report import ResultRow, make_row, print_rows
from benchmarks.load import http_stream

HELP = "tokens a second that the coordinator carries, and what it adds to the time to first token"
THROUGHPUT_LIMIT = 3000.0  # minimum, in tokens per second of one core
TTFT_LIMIT = 5.0  # maximum of the added median, in milliseconds
FRONTS = ("http", "grpc")
_START_TIMEOUT = 60.0  # seconds
_PROMPT = list(range(1, 65))
_SHORT_ANSWER_TOKENS = 4  # of an answer whose first token is timed
_WARM_UP = 10  # requests


@dataclass(frozen=True, slots=True)
class StreamSample:
    """One measured stream."""

    ttft: float  # seconds to its first token
    tokens: int


@dataclass(frozen=True, slots=True)
class CoordinatorFigures:
    """What was measured at one front end; times in seconds."""

    tokens: int  # streamed meanwhile
    busy_seconds: float  # CPU time of the coordinator
    wall_seconds: float
    ttft_seconds: list[float]
    bare_ttft_seconds: list[float]  # of the bare front end


StreamRequest = Callable[[int], Awaitable[StreamSample]]  # takes the number of tokens to stream


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--front", choices=(*FRONTS, "all"), default="all", help="which one (default all)"
    )
    parser.add_argument("--streams", type=int, default=64, help="at a time (default 64)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream (default 1000)")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="between the nodes' steps (default 0)"
    )
    parser.add_argument(
        "--ttft-requests", type=int, default=200, help="whose first token is timed (default 200)"
    )


async def measure_fronts(
    options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    rows: list[ResultRow] = []
    folder, failed = Path(tempfile.mkdtemp(prefix="baton-bench-")), True
    try:
        model = await asyncio.to_thread(build_random_model, folder / "narrow", NARROW_SHAPE)
        async with _start_processes(folder, model, options.step_ms / 1e3) as (endpoints, bare, pid):
            for front in FRONTS if options.front == "all" else (options.front,):
                async with (
                    _front_client(front, endpoints) as ask,
                    _front_client(front, bare) as ask_bare,
                ):
                    figures = await _measure_front(ask, ask_bare, pid, options)
                rows += to_rows(front, figures, command)
        failed = False
    finally:
        if failed:
            console.print(f"the logs of the coordinator and the nodes are in {folder / 'log'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return rows


async def _measure_front(
    ask: StreamRequest, ask_bare: StreamRequest, pid: int, options: argparse.Namespace
) -> CoordinatorFigures:
    for _ in range(_WARM_UP):
        await ask(_SHORT_ANSWER_TOKENS)
        await ask_bare(_SHORT_ANSWER_TOKENS)
    pairs = [
        (await ask(_SHORT_ANSWER_TOKENS), await ask_bare(_SHORT_ANSWER_TOKENS))
        for _ in range(options.ttft_requests)
    ]
    ttft, bare = ([sample.ttft for sample in column] for column in zip(*pairs, strict=True))
    began, busy_before = time.perf_counter(), cpu_seconds(pid)
    samples = await asyncio.gather(*(ask(options.tokens) for _ in range(options.streams)))
    tokens = sum(sample.tokens for sample in samples)
    if tokens != options.streams * options.tokens:
        raise NodeFailed(f"{tokens} tokens came, {options.streams * options.tokens} were asked for")
    return CoordinatorFigures(
        tokens, cpu_seconds(pid) - busy_before, time.perf_counter() - began, ttft, bare
    )


def to_rows(front: str, figures: CoordinatorFigures, command: str) -> list[ResultRow]:
    prefix, bare = f"coordinator/{front}", percentile(figures.bare_ttft_seconds, 50) * 1e3
    ttft = [seconds * 1e3 for seconds in figures.ttft_seconds]
    return [
        make_row(
            f"{prefix}/throughput",
            figures.tokens / figures.busy_seconds,
            "tokens/core-s",
            command,
            THROUGHPUT_LIMIT,
        ),
        make_row(
            f"{prefix}/cost", figures.busy_seconds / figures.tokens * 1e6, "us/token", command
        ),
        make_row(f"{prefix}/wall", figures.tokens / figures.wall_seconds, "tokens/s", command),
        make_row(f"{prefix}/ttft_p50", percentile(ttft, 50), "ms", command),
        make_row(f"{prefix}/ttft_p99", percentile(ttft, 99), "ms", command),
        make_row(f"{prefix}/ttft_bare_p50", bare, "ms", command),
        make_row(
            f"{prefix}/ttft_added_p50", percentile(ttft, 50) - bare, "ms", command, TTFT_LIMIT
        ),
    ]


# the processes


@dataclass(frozen=True, slots=True)
class FrontEndpoints:
    """The addresses of the HTTP and the gRPC front end, each HOST:PORT."""

    http: str
    grpc: str


@asynccontextmanager
async def _start_processes(
    folder: Path, model: Path, step: float
) -> AsyncIterator[tuple[FrontEndpoints, FrontEndpoints, int]]:
    """Start a coordinator with instant nodes, and a bare front end.

    Yields the endpoints of both and the pid of the coordinator, which serves `model`.
    """
    settings = Config(
        model=str(model), port=0, grpc_port=0, admin_port=0, drain_timeout=5.0, log_level="warning"
    )
    config, sockets = ports.reserve_ports(child_specs.complete_config(settings)[0])
    endpoints = ports.cluster_endpoints(config)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    spec = child_specs.make_child_specs(
        config, endpoints, environ=environ, cores=1, supervisor=os.getpid()
    )[0]
    nodes = ["benchmarks.clusters.instant_nodes", endpoints.cluster]
    nodes += ["--vocabulary", str(NARROW_SHAPE.vocabulary), "--step", str(step)]
    cores = sorted(os.sched_getaffinity(0))
    processes: list[asyncio.subprocess.Process] = []
    with (folder / "log").open("wb") as log:
        start = partial(_start_module, processes, spec.environ, log.fileno())
        try:
            coordinator = await start(spec.module)
            instant = await start(*nodes)
            front = await start("benchmarks.clusters.instant_front", stdout=asyncio.subprocess.PIPE)
            for process in (coordinator, front):
                os.sched_setaffinity(process.pid, cores[:1])
            if len(cores) > 1:
                os.sched_setaffinity(0, cores[1:])
                os.sched_setaffinity(instant.pid, cores[1:])
            async with asyncio.timeout(_START_TIMEOUT):
                assert front.stdout is not None
                http, grpc_port = (await front.stdout.readline()).split()
                await wait_until_serving(endpoints.grpc)
            bare = FrontEndpoints(f"127.0.0.1:{int(http)}", f"127.0.0.1:{int(grpc_port)}")
            yield FrontEndpoints(endpoints.http, endpoints.grpc), bare, coordinator.pid
        finally:
            os.sched_setaffinity(0, cores)
            await _stop_processes(processes)
            for reserved in sockets:
                reserved.close()


async def _start_module(
    processes: list[asyncio.subprocess.Process],
    environ: Mapping[str, str],
    log: int,
    *arguments: str,
    stdout: int | None = None,
) -> asyncio.subprocess.Process:
    """Start `python -m` with `arguments` and add it to `processes`; output goes to `log`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments), env=environ, stdout=stdout or log, stderr=log
    )
    processes.append(process)
    return process


async def _stop_processes(processes: Sequence[asyncio.subprocess.Process]) -> None:
    """Stop them, the last one started first."""
    for process in reversed(processes):
        if process.returncode is None:
            process.terminate()
        await process.wait()


# the clients


@asynccontextmanager
async def _front_client(front: str, endpoints: FrontEndpoints) -> AsyncIterator[StreamRequest]:
    if front == "http":
        target = http_stream.parse_url(f"http://{endpoints.http}")
        yield lambda tokens: _stream_by_http(target, tokens)
    else:
        async with grpc.aio.insecure_channel(endpoints.grpc) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            yield lambda tokens: _stream_by_grpc(stub, tokens)


async def _stream_by_http(target: http_stream.HttpTarget, tokens: int) -> StreamSample:
    """Stream one answer. Only the last event, which has the usage, is parsed, to save CPU time."""
    body = msgspec.json.encode(
        {
            "prompt": _PROMPT,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    headers = {"Content-Type": "application/json"}
    began, first, tail = time.perf_counter(), 0.0, b""
    async with http_stream.open_request(
        target, "POST", "/v1/completions", headers, body
    ) as response:
        if response.status != 200:
            raise NodeFailed(
                f"status {response.status}: {(await response.read_body()).decode(errors='replace')}"
            )
        async for chunk in response.iter_body():
            first = first or time.perf_counter()
            tail = tail[-2048:] + chunk
    events = tail.split(b"data: ")
    if events[-1].strip() != b"[DONE]":
        raise NodeFailed(f"a stream ended without [DONE]: {events[-1].decode(errors='replace')}")
    return StreamSample(
        first - began, msgspec.json.decode(events[-2])["usage"]["completion_tokens"]
    )


async def _stream_by_grpc(stub: generation_pb2_grpc.GenerationStub, tokens: int) -> StreamSample:
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=_PROMPT), max_tokens=tokens, ignore_eos=True
    )
    began, first, count = time.perf_counter(), 0.0, 0
    async for answer in stub.Generate(request, timeout=_START_TIMEOUT):
        first = first or time.perf_counter()
        count += len(answer.token_ids)
    return StreamSample(first - began, count)


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows = asyncio.run(measure_fronts(options, console, command))
    print_rows(console, f"coordinator: {options.streams} streams", rows)
    return rows
