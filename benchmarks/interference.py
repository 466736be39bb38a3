"""`interference`: how much longer a decode step takes while hand-offs land, over each transport,
with real processes.

Four requests decode all the time. In turns, nothing happens beside them, or prompts flow back to
back:

    prefill     fresh prompts whose answer is one token: computed, and not handed over
    computed    fresh prompts: layers flow as fast as they are computed
    paced       prompts that the prefill node has in its cache and decode has not, as many in a second as `computed` had
                in this round: each is handed over at once, and instead of computing it the prefill node waits
    full_rate   the same prompts without the waiting: they flow as fast as the link, and decode, take them

The figure is the median time between two tokens of a stream against that of the idle windows just
before and after, and of these the median over the rounds: growing contexts and other load of the
machine touch both. Where two processes share execution units, caches or memory, `prefill` is above
1 without any transfer, and `computed` with it. `paced` is the transfer without that,
`computed_of_prefill` the transfer beside it. At the full rate, decode also has several of the
requests that came with the prompts in each of its steps.

`_cpu` is the same of processor time: all that the decode node's threads used, by the steps that
they made. A decode node with a core of its own is never idle while it decodes, so this is its mean
step there. It includes the work for the requests that come with the prompts, and hardly changes
with what else the machine has to do.

The decode node has the last core to itself, with all of its threads, as on a machine of its own;
everything else shares the others. Prefill cannot take decode's core then, but every byte that lands
does. `--no-pin` leaves it to the kernel.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from rich.console import Console

from baton.errors import NodeFailed
from baton.pb import cluster_pb2, cluster_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import DEMO_SHAPE
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.report import ResultRow, make_row, print_rows

HELP = "how much hand-offs disturb decode, over each transport"
TRANSPORTS = ("shm", "zmq", "grpc")
PROMPT_TOKENS = 2048  # tokens
MAX_STEP_RATIO = 1.2  # decode step while prompts are handed over, by the idle one
HANDOFF_WINDOWS = ("computed", "paced", "full_rate")
WINDOW_KINDS = ("prefill", *HANDOFF_WINDOWS)
_SHAPE = replace(DEMO_SHAPE, context=8192)
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = 4, 1024, 7000
_IN_FLIGHT = 3  # prompts: there is always a next one
# prompts of the full rate, of 16 MiB each: the prefill node holds them, and decode beside its
# streams not
_CACHED_PROMPTS = 8
_DECODE_KV_MEMORY = "144MiB"
_MIN_STEPS = 8  # steps of all streams that make a median
_SETTLE = 0.3  # seconds between windows
_DEADLINE = 300.0  # seconds of one request


@dataclass(slots=True)
class DecodeStream:
    """When the tokens of one decoding request came."""

    token_times: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_token(self) -> None:
        self.token_times.append(time.perf_counter())
        self.has_begun.set()

    def find_gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between tokens that came in the window."""
        inside = [moment for moment in self.token_times if began <= moment <= ended]
        return [later - earlier for earlier, later in itertools.pairwise(inside)]


@dataclass(frozen=True, slots=True)
class WindowSample:
    """What was seen in one: seconds of the median step, and of decode's processor time by steps."""

    step_seconds: float
    cpu_seconds: float


@dataclass(slots=True)
class InterferenceSamples:
    """The windows of one kind, the mean of the idle ones around each, and the bytes that were
    handed over in all."""

    loaded_windows: list[WindowSample] = field(default_factory=list)
    idle_windows: list[WindowSample] = field(default_factory=list)
    moved_bytes: float = 0.0

    @property
    def step_ratio(self) -> float:
        """Loaded by idle, median."""
        return _median(
            one.step_seconds / idle.step_seconds
            for one, idle in zip(self.loaded_windows, self.idle_windows, strict=True)
        )

    @property
    def cpu_ratio(self) -> float:
        return _median(
            one.cpu_seconds / idle.cpu_seconds
            for one, idle in zip(self.loaded_windows, self.idle_windows, strict=True)
        )


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)


def _mean_window(before: WindowSample, after: WindowSample) -> WindowSample:
    return WindowSample(
        (before.step_seconds + after.step_seconds) / 2, (before.cpu_seconds + after.cpu_seconds) / 2
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", choices=(*TRANSPORTS, "all"), default="all", help="which one (default all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each transport and load (default 5)"
    )
    parser.add_argument(
        "--window", type=float, default=2.0, help="seconds of each window (default 2)"
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="leave it to the kernel which core runs what"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    rows: list[ResultRow] = []
    for transport in TRANSPORTS if options.transport == "all" else (options.transport,):
        seen = asyncio.run(_measure_transport(transport, options, console))
        rows += to_rows(transport, seen, options.rounds * options.window, command)
    print_rows(console, "interference: the median decode step while prompts are handed over", rows)
    return rows


def to_rows(
    transport: str, seen: Mapping[str, InterferenceSamples], seconds: float, command: str
) -> list[ResultRow]:
    """`seconds` of all windows of a kind together. Raises NodeFailed when nothing was handed over
    where it should."""
    prefix = f"interference/{transport}"
    idle = _median(window.step_seconds for one in seen.values() for window in one.idle_windows)
    rows = [make_row(f"{prefix}/idle_step", idle * 1e3, "ms", command)]
    for name in WINDOW_KINDS:
        limit = MAX_STEP_RATIO if name in HANDOFF_WINDOWS else None  # at the full rate an aim
        rows.append(make_row(f"{prefix}/{name}", seen[name].step_ratio, "x idle", command, limit))
        rows.append(
            make_row(f"{prefix}/{name}_cpu", seen[name].cpu_ratio, "x idle", command, limit)
        )
    alone = seen["computed"].step_ratio / seen["prefill"].step_ratio
    rows.append(make_row(f"{prefix}/computed_of_prefill", alone, "x prefill", command))
    for name in HANDOFF_WINDOWS:
        if seen[name].moved_bytes <= 0:
            raise NodeFailed(f"nothing was handed over by {transport} in the windows of {name}")
        rows.append(
            make_row(
                f"{prefix}/{name}_moved", seen[name].moved_bytes / seconds / 1e6, "MB/s", command
            )
        )
    return rows


async def _measure_transport(
    transport: str, options: argparse.Namespace, console: Console
) -> dict[str, InterferenceSamples]:
    settings = {
        "transport": transport,
        "threads": "1",
        "max_batched_tokens": 512,
        "kv_memory": "1GiB",
    }
    settings["pool_memory"] = "0"  # what decode finds in a pool is not handed over
    own = {"decode-0": {"BATON_KV_MEMORY": _DECODE_KV_MEMORY}}
    source = random.Random(options.seed)
    seen = {name: InterferenceSamples() for name in WINDOW_KINDS}
    async with start_local_cluster(console, _SHAPE, "interference", own=own, **settings) as cluster:
        decode = cluster.get_pids()["decode-0"]
        if not options.no_pin:
            _pin_decode(cluster.get_pids())
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            stub, counted = (
                generation_pb2_grpc.GenerationStub(channel),
                cluster_pb2_grpc.ClusterStub(channel),
            )
            prompts = PromptFlow(stub, source)
            await prompts.fill_prefill_cache()
            for _ in range(options.rounds):
                async with _decode_streams(stub, source) as streams:
                    idle = await _sample_window(streams, options.window, decode)
                    for name in WINDOW_KINDS:
                        moved = await _handed_over_bytes(counted, transport)
                        async with prompts.send_prompts(name):
                            seen[name].loaded_windows.append(
                                await _sample_window(streams, options.window, decode)
                            )
                        before, idle = idle, await _sample_window(streams, options.window, decode)
                        seen[name].idle_windows.append(_mean_window(before, idle))
                        seen[name].moved_bytes += (
                            await _handed_over_bytes(counted, transport) - moved
                        )
    return seen


def _pin_decode(pids: dict[str, int]) -> None:
    """The decode node's threads to the last core, all others to the rest; threads started later
    follow."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(
                    int(task.name), cores[-1:] if name.startswith("decode") else cores[:-1]
                )


class PromptFlow:
    """What flows in each kind of window."""

    def __init__(self, stub: generation_pb2_grpc.GenerationStub, source: random.Random) -> None:
        self._stub = stub
        self._source = source
        self._cached = [_random_prompt(source, PROMPT_TOKENS) for _ in range(_CACHED_PROMPTS)]
        self._cached_cycle = itertools.cycle(self._cached)
        self._completed = 0
        self._pause_seconds = (
            0.0  # seconds of each of those in flight, if all of them were computed
        )

    async def fill_prefill_cache(self) -> None:
        """The prefill node's, by prompts that do not reach decode."""
        for prompt in self._cached:
            await _generate(self._stub, prompt, 1)

    @contextlib.asynccontextmanager
    async def send_prompts(self, name: str) -> AsyncIterator[None]:
        """Prompts of a kind flow through the block, back to back. `paced` ones flow as those
        `computed` before."""
        began, ended = time.perf_counter(), self._completed
        tasks = [
            asyncio.create_task(self._send_repeatedly(name, turn)) for turn in range(_IN_FLIGHT)
        ]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
            if name == "computed":
                self._pause_seconds = (
                    _IN_FLIGHT * (time.perf_counter() - began) / max(1, self._completed - ended)
                )
        finally:
            await _cancel_tasks(tasks)

    async def _send_repeatedly(self, name: str, turn: int) -> None:
        wait = self._pause_seconds if name == "paced" else 0.0
        await asyncio.sleep(wait * turn / _IN_FLIGHT)
        while True:
            pause = asyncio.create_task(asyncio.sleep(wait))
            fresh = name in ("prefill", "computed")
            prompt = (
                _random_prompt(self._source, PROMPT_TOKENS) if fresh else next(self._cached_cycle)
            )
            await _generate(self._stub, prompt, 1 if name == "prefill" else 2)
            self._completed += 1
            await pause


def _random_prompt(source: random.Random, tokens: int) -> list[int]:
    return [source.randrange(16, _SHAPE.vocabulary) for _ in range(tokens)]


async def _generate(
    stub: generation_pb2_grpc.GenerationStub,
    prompt: list[int],
    tokens: int,
    stream: DecodeStream | None = None,
) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    async for answer in stub.Generate(request, timeout=_DEADLINE):
        if stream is not None and answer.token_ids:
            stream.on_token()


@contextlib.asynccontextmanager
async def _decode_streams(
    stub: generation_pb2_grpc.GenerationStub, source: random.Random
) -> AsyncIterator[list[DecodeStream]]:
    """All of the streams have their first tokens when the block begins."""
    streams = [DecodeStream() for _ in range(_STREAMS)]
    tasks = [
        asyncio.create_task(
            _generate(stub, _random_prompt(source, _STREAM_PROMPT), _STREAM_TOKENS, stream)
        )
        for stream in streams
    ]
    try:
        async with asyncio.timeout(_DEADLINE):
            await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        yield streams
        if ended := [task for task in tasks if task.done()]:
            raise NodeFailed(
                f"{len(ended)} of {_STREAMS} decoding requests ended too early: give a shorter --window"
            )
    finally:
        await _cancel_tasks(tasks)


async def _sample_window(streams: list[DecodeStream], seconds: float, decode: int) -> WindowSample:
    """What is seen in the next `seconds`; `decode` is a process id. Raises NodeFailed when there
    are too few steps."""
    await asyncio.sleep(_SETTLE)
    began, used = time.perf_counter(), _processor_time(decode)
    await asyncio.sleep(seconds)
    ended, used = time.perf_counter(), _processor_time(decode) - used
    gaps = [gap for stream in streams for gap in stream.find_gaps(began, ended)]
    if len(gaps) < _MIN_STEPS:
        raise NodeFailed(f"{len(gaps)} decode steps seen in {seconds:g} s: give a longer --window")
    return WindowSample(percentile(gaps, 50), used * len(streams) / len(gaps))


def _processor_time(pid: int) -> float:
    """Seconds that all threads of a process have used, in user mode and in the kernel
    (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _cancel_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _handed_over_bytes(cluster: cluster_pb2_grpc.ClusterStub, transport: str) -> float:
    """Bytes handed over so far, by the coordinator's own account."""
    status = await cluster.Status(cluster_pb2.StatusRequest())
    return float(status.counters.get(f'baton_handoff_bytes_total{{transport="{transport}"}}', 0.0))
