"""`interference`: how much longer a decode step takes while hand-offs land, over each transport, with real processes.

Four requests decode all the time. Beside them, in turns, nothing happens; or prompts are computed by the prefill node
and handed over, back to back. The figure is the median time between two tokens of a stream against that of the idle
window before it in the same round, and of these the median over the rounds: what else changes from minute to minute,
the machine's load or the length of the contexts, touches both.

    computed    fresh prompts: layers flow as fast as they are computed
    full rate   prompts that the prefill node has in its cache and decode has not: whole prompts flow as fast as the
                link, and decode, take them
    prefill     fresh prompts whose answer is one token: computed and not handed over. What of `computed` is due to the
                prefill node's own use of memory and caches, not to the transfer

The decode node has the last core to itself, with all of its threads, as on a machine of its own; everything else shares
the others. Prefill cannot take decode's core then, but every byte that lands does. `--no-pin` leaves it to the kernel.
"""

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from rich.console import Console

from baton.errors import NodeFailed
from baton.pb import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from benchmarks.local_cluster import local_cluster
from benchmarks.models import DEMO
from benchmarks.percentiles import percentile
from benchmarks.report import Row, print_rows, row

HELP = "how much hand-offs disturb decode, over each transport"
TRANSPORTS = ("shm", "zmq", "grpc")
PROMPT = 2048  # tokens
LIMIT = 1.2  # decode step while prompts are handed over, by the idle one
_SHAPE = replace(DEMO, context=16384)
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = 4, 1024, 12000
_IN_FLIGHT = 2  # prompts: the prefill node always has the next one
_CACHED = 8  # prompts of the full rate
# KV memory that holds all of those on the prefill node, and not on decode, whose streams take a quarter of it.
_CACHED_KV = "136MiB"
_SETTLE = 0.3  # seconds between windows
_DEADLINE = 300.0  # seconds of one request

Submit = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Streams:
    """When tokens of the decoding requests came, a list for each."""

    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(_STREAMS)])

    def step(self, began: float, ended: float) -> float:
        """Median seconds between tokens that came in the window. Raises NodeFailed when there are too few."""
        gaps: list[float] = []
        for moments in self.arrivals:
            inside = [moment for moment in moments if began <= moment <= ended]
            gaps += [later - earlier for earlier, later in zip(inside, inside[1:], strict=False)]
        if len(gaps) < 2 * _STREAMS:
            raise NodeFailed(f"{len(gaps)} decode steps in a window of {ended - began:.1f} s: give a longer --window")
        return percentile(gaps, 50)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over rounds. Times in seconds; `rate` in bytes per second of the windows in which prompts flowed."""

    idle: float
    steps: dict[str, float]
    ratios: dict[str, float]
    rate: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", choices=(*TRANSPORTS, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5, help="of each transport and load (default 5)")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of each window (default 3)")
    parser.add_argument("--no-pin", action="store_true", help="leave it to the kernel which core runs what")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")


def main(options: argparse.Namespace, console: Console, command: str) -> list[Row]:
    rows: list[Row] = []
    for transport in TRANSPORTS if options.transport == "all" else (options.transport,):
        rows += asyncio.run(_of_transport(transport, options, console, command))
    print_rows(console, "interference: the median decode step while prompts are handed over", rows)
    return rows


async def _of_transport(transport: str, options: argparse.Namespace, console: Console, command: str) -> list[Row]:
    computed = await _measure(transport, options, console, ("prefill", "computed"), "1GiB")
    full = await _measure(transport, options, console, ("full_rate",), _CACHED_KV)
    rows = [row(f"interference/{transport}/idle_step", computed.idle * 1e3, "ms", command)]
    for outcome in (computed, full):
        for name, ratio in outcome.ratios.items():
            limit = None if name == "prefill" else LIMIT
            rows.append(row(f"interference/{transport}/{name}", ratio, "x idle", command, limit))
            rows.append(row(f"interference/{transport}/{name}_step", outcome.steps[name] * 1e3, "ms", command))
        label = "computed" if outcome is computed else "full_rate"
        rows.append(row(f"interference/{transport}/{label}_moved", outcome.rate / 1e6, "MB/s", command))
    return rows


async def _measure(
    transport: str, options: argparse.Namespace, console: Console, loads: tuple[str, ...], kv_memory: str
) -> Outcome:
    settings = {"transport": transport, "kv_memory": kv_memory, "threads": "1", "max_batched_tokens": 512}
    source = random.Random(options.seed)
    idle: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in loads}
    ratios: dict[str, list[float]] = {name: [] for name in loads}
    async with local_cluster(console, _SHAPE, "interference", **settings) as cluster:
        if not options.no_pin:
            _pin(cluster.pids())
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            stub, counted = generation_pb2_grpc.GenerationStub(channel), cluster_pb2_grpc.ClusterStub(channel)
            submit = await _submitters(stub, source, loads)
            async with _decoding(stub, source) as streams:
                before = await _moved(counted, transport)
                for _ in range(options.rounds):
                    idle.append(await _window(streams, None, options.window))
                    for name in loads:
                        steps[name].append(await _window(streams, submit[name], options.window))
                        ratios[name].append(steps[name][-1] / idle[-1])
                moved = await _moved(counted, transport) - before
    if moved <= 0:
        raise NodeFailed(f"nothing was handed over by {transport}")
    return Outcome(
        percentile(idle, 50),
        {name: percentile(values, 50) for name, values in steps.items()},
        {name: percentile(values, 50) for name, values in ratios.items()},
        moved / (options.rounds * options.window),
    )


def _pin(pids: dict[str, int]) -> None:
    """The decode node's threads to the last core, all others to the rest; threads started later follow."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(task.name), cores[-1:] if name.startswith("decode") else cores[:-1])


async def _submitters(
    stub: generation_pb2_grpc.GenerationStub, source: random.Random, loads: Iterable[str]
) -> dict[str, Submit]:
    """What each load does again and again. The prompts of the full rate are brought into the prefill node's cache."""
    submit: dict[str, Submit] = {
        "prefill": lambda: _generate(stub, _prompt(source, PROMPT), 1),
        "computed": lambda: _generate(stub, _prompt(source, PROMPT), 2),
    }
    if "full_rate" in loads:
        cached = [_prompt(source, PROMPT) for _ in range(_CACHED)]
        for prompt in cached:
            await _generate(stub, prompt, 1)
        turn = iter(range(1 << 30))
        submit["full_rate"] = lambda: _generate(stub, cached[next(turn) % _CACHED], 2)
    return submit


def _prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(16, _SHAPE.vocabulary) for _ in range(tokens)]


async def _generate(
    stub: generation_pb2_grpc.GenerationStub, prompt: list[int], tokens: int, arrivals: list[float] | None = None
) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt), max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    async for answer in stub.Generate(request, timeout=_DEADLINE):
        if arrivals is not None and answer.token_ids:
            arrivals.append(time.perf_counter())


@contextlib.asynccontextmanager
async def _decoding(stub: generation_pb2_grpc.GenerationStub, source: random.Random) -> AsyncIterator[Streams]:
    """All of the streams have their first tokens when the block begins."""
    streams = Streams()
    tasks = [
        asyncio.create_task(_generate(stub, _prompt(source, _STREAM_PROMPT), _STREAM_TOKENS, arrivals))
        for arrivals in streams.arrivals
    ]
    try:
        async with asyncio.timeout(_DEADLINE):
            while not all(streams.arrivals):
                await asyncio.sleep(_SETTLE)
        yield streams
        if ended := [task for task in tasks if task.done()]:
            raise NodeFailed(f"{len(ended)} of {_STREAMS} decoding requests ended too early: give a shorter --window")
    finally:
        await _cancelled(tasks)


async def _window(streams: Streams, submit: Submit | None, seconds: float) -> float:
    """The median step while `submit` is called over and over, or while nothing happens."""
    tasks = [asyncio.create_task(_repeat(submit)) for _ in range(_IN_FLIGHT)] if submit else []
    await asyncio.sleep(_SETTLE)
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    step = streams.step(began, time.perf_counter())
    for task in tasks:
        if task.done():
            task.result()  # raises what ended it
    await _cancelled(tasks)
    await asyncio.sleep(_SETTLE)
    return step


async def _repeat(submit: Submit) -> None:
    while True:
        await submit()


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _moved(cluster: cluster_pb2_grpc.ClusterStub, transport: str) -> float:
    """Bytes handed over so far, by the coordinator's own account."""
    status = await cluster.Status(cluster_pb2.StatusRequest())
    return float(status.counters.get(f'baton_handoff_bytes_total{{transport="{transport}"}}', 0.0))
