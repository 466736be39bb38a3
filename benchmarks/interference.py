"""`interference`: how much longer a decode step takes while hand-offs land, by transport.

The processes are real. Four requests decode all the time. In turns, either nothing else happens, or
prompts flow back to back:

    prefill     fresh prompts with an answer of one token: computed and not handed over
    computed    fresh prompts: layers flow as fast as they are computed
    paced       prompts that the prefill node has in its cache and decode has not, as many per
                second as `computed` had in this round: each is handed over at once, and the
                prefill node waits instead of computing it
    full_rate   the same prompts without the waits: as fast as the link and decode take them

 The figure is the median time between two tokens of a stream, relative to that of the idle windows
just before and after, and of these the median over the rounds: growing contexts and other load of
the machine affect both. Where two processes share execution units, caches or memory, `prefill` is
above 1 without any transfer, and so is `computed`. `paced` is the transfer alone, and
`computed_of_prefill` the transfer in addition to prefill. At the full rate, each decode step also
has several of the requests that came with the prompts.

`_cpu` is the same ratio of CPU time: that of all threads of the decode node, divided by its steps.
A decode node with its own core is never idle while it decodes, so there this is its mean step. It
includes the work for the requests that come with the prompts, and hardly changes with other load of
the machine.

The decode node has the last core to itself, with all of its threads, as on its own machine;
everything else shares the other cores. Prefill cannot take decode's core then, but every byte that
lands does. `--no-pin` leaves the placement to the kernel.
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
from baton.types import STAGED_TRANSPORTS
from benchmarks.clusters.local_cluster import start_local_cluster
from benchmarks.clusters.random_models import DEMO_SHAPE
from benchmarks.figures.percentiles import percentile
from benchmarks.figures.process_time import cpu_seconds
from benchmarks.figures.report import ResultRow, make_row, print_rows

HELP = "how much hand-offs disturb decode, over each transport"
PROMPT_TOKENS = 2048
MAX_STEP_RATIO = 1.2  # decode step while prompts are handed over / idle decode step
HANDOFF_WINDOWS = ("computed", "paced", "full_rate")
WINDOW_KINDS = ("prefill", *HANDOFF_WINDOWS)
_SHAPE = replace(DEMO_SHAPE, context=8192)
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = 4, 1024, 7000
_IN_FLIGHT = 3  # prompts, so that there is always a next one
# Prompts of `paced` and `full_rate`, 16 MiB each. They fit into the prefill node's cache, but not
# into decode's cache together with its streams.
_CACHED_PROMPTS = 8
_DECODE_KV_MEMORY = "144MiB"
_MIN_STEPS = 8  # steps of all streams that suffice for a median
_SETTLE = 0.3  # seconds between windows
_DEADLINE = 300.0  # seconds of one request


@dataclass(slots=True)
class DecodeStream:
    """Arrival times of the tokens of one decoding request."""

    token_times: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_token(self) -> None:
        self.token_times.append(time.perf_counter())
        self.has_begun.set()

    def find_gaps(self, began: float, ended: float) -> list[float]:
        """Return the seconds between successive tokens within the window."""
        inside = [moment for moment in self.token_times if began <= moment <= ended]
        return [later - earlier for earlier, later in itertools.pairwise(inside)]


@dataclass(frozen=True, slots=True)
class WindowSample:
    """What was measured in one window."""

    step_seconds: float  # median decode step
    cpu_seconds: float  # CPU time of the decode node per step


@dataclass(slots=True)
class InterferenceSamples:
    """The windows of one kind, each with the mean of the idle windows around it."""

    loaded_windows: list[WindowSample] = field(default_factory=list)
    idle_windows: list[WindowSample] = field(default_factory=list)
    moved_bytes: float = 0.0  # handed over in all windows

    @property
    def step_ratio(self) -> float:
        """The median ratio of the loaded to the idle decode step."""
        return _median(
            loaded.step_seconds / idle.step_seconds
            for loaded, idle in zip(self.loaded_windows, self.idle_windows, strict=True)
        )

    @property
    def cpu_ratio(self) -> float:
        return _median(
            loaded.cpu_seconds / idle.cpu_seconds
            for loaded, idle in zip(self.loaded_windows, self.idle_windows, strict=True)
        )


def _median(values: Iterable[float]) -> float:
    return percentile(list(values), 50)


def _mean_window(before: WindowSample, after: WindowSample) -> WindowSample:
    return WindowSample(
        (before.step_seconds + after.step_seconds) / 2, (before.cpu_seconds + after.cpu_seconds) / 2
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        choices=(*STAGED_TRANSPORTS, "all"),
        default="all",
        help="which one (default all)",
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
    for transport in STAGED_TRANSPORTS if options.transport == "all" else (options.transport,):
        samples = asyncio.run(_measure_transport(transport, options, console))
        rows += to_rows(transport, samples, options.rounds * options.window, command)
    print_rows(console, "interference: the median decode step while prompts are handed over", rows)
    return rows


def to_rows(
    transport: str, samples: Mapping[str, InterferenceSamples], seconds: float, command: str
) -> list[ResultRow]:
    """Return the rows; `seconds` is the length of all windows of a kind together.

    Raises NodeFailed when nothing was handed over where it should have been.
    """
    prefix = f"interference/{transport}"
    idle = _median(
        window.step_seconds
        for kind_samples in samples.values()
        for window in kind_samples.idle_windows
    )
    rows = [make_row(f"{prefix}/idle_step", idle * 1e3, "ms", command)]
    for name in WINDOW_KINDS:
        limit = MAX_STEP_RATIO if name in HANDOFF_WINDOWS else None  # at the full rate a goal
        rows.append(
            make_row(f"{prefix}/{name}", samples[name].step_ratio, "x idle", command, limit)
        )
        rows.append(
            make_row(f"{prefix}/{name}_cpu", samples[name].cpu_ratio, "x idle", command, limit)
        )
    alone = samples["computed"].step_ratio / samples["prefill"].step_ratio
    rows.append(make_row(f"{prefix}/computed_of_prefill", alone, "x prefill", command))
    for name in HANDOFF_WINDOWS:
        if samples[name].moved_bytes <= 0:
            raise NodeFailed(f"nothing was handed over by {transport} in the windows of {name}")
        rows.append(
            make_row(
                f"{prefix}/{name}_moved", samples[name].moved_bytes / seconds / 1e6, "MB/s", command
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
    settings["pool_memory"] = "0"  # blocks that decode finds in a pool are not handed over
    own = {"decode-0": {"BATON_KV_MEMORY": _DECODE_KV_MEMORY}}
    random_source = random.Random(options.seed)
    samples = {name: InterferenceSamples() for name in WINDOW_KINDS}
    async with start_local_cluster(console, _SHAPE, "interference", own=own, **settings) as cluster:
        decode = cluster.get_pids()["decode-0"]
        if not options.no_pin:
            _pin_decode(cluster.get_pids())
        async with grpc.aio.insecure_channel(cluster.endpoints.grpc) as channel:
            stub, counted = (
                generation_pb2_grpc.GenerationStub(channel),
                cluster_pb2_grpc.ClusterStub(channel),
            )
            prompts = PromptFlow(stub, random_source)
            await prompts.fill_prefill_cache()
            for _ in range(options.rounds):
                async with _decode_streams(stub, random_source) as streams:
                    idle = await _sample_window(streams, options.window, decode)
                    for name in WINDOW_KINDS:
                        moved = await _handed_over_bytes(counted, transport)
                        async with prompts.send_prompts(name):
                            samples[name].loaded_windows.append(
                                await _sample_window(streams, options.window, decode)
                            )
                        before, idle = idle, await _sample_window(streams, options.window, decode)
                        samples[name].idle_windows.append(_mean_window(before, idle))
                        samples[name].moved_bytes += (
                            await _handed_over_bytes(counted, transport) - moved
                        )
    return samples


def _pin_decode(pids: dict[str, int]) -> None:
    """Pin the decode node's threads to the last core and all others to the rest.

    Threads that start later inherit this.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(
                    int(task.name), cores[-1:] if name.startswith("decode") else cores[:-1]
                )


class PromptFlow:
    """Sends the prompts of each kind of window."""

    def __init__(
        self, stub: generation_pb2_grpc.GenerationStub, random_source: random.Random
    ) -> None:
        self._stub = stub
        self._source = random_source
        self._cached = [
            _random_prompt(random_source, PROMPT_TOKENS) for _ in range(_CACHED_PROMPTS)
        ]
        self._cached_cycle = itertools.cycle(self._cached)
        self._completed = 0
        self._pause_seconds = 0.0  # mean time of a prompt in flight while `computed` ran

    async def fill_prefill_cache(self) -> None:
        """Put the cached prompts into the prefill node's cache only; they do not reach decode."""
        for prompt in self._cached:
            await _generate(self._stub, prompt, 1)

    @contextlib.asynccontextmanager
    async def send_prompts(self, name: str) -> AsyncIterator[None]:
        """Send prompts of a kind back to back for the length of the block.

        `paced` prompts flow at the rate of the last `computed` block.
        """
        began, ended = time.perf_counter(), self._completed
        tasks = [
            asyncio.create_task(self._send_repeatedly(name, turn)) for turn in range(_IN_FLIGHT)
        ]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()  # raises its error
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
            is_new_prompt = name in ("prefill", "computed")
            prompt = (
                _random_prompt(self._source, PROMPT_TOKENS)
                if is_new_prompt
                else next(self._cached_cycle)
            )
            await _generate(self._stub, prompt, 1 if name == "prefill" else 2)
            self._completed += 1
            await pause


def _random_prompt(random_source: random.Random, tokens: int) -> list[int]:
    return [random_source.randrange(16, _SHAPE.vocabulary) for _ in range(tokens)]


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
    stub: generation_pb2_grpc.GenerationStub, random_source: random.Random
) -> AsyncIterator[list[DecodeStream]]:
    """Run the decoding streams; the block begins when all have their first token."""
    streams = [DecodeStream() for _ in range(_STREAMS)]
    tasks = [
        asyncio.create_task(
            _generate(stub, _random_prompt(random_source, _STREAM_PROMPT), _STREAM_TOKENS, stream)
        )
        for stream in streams
    ]
    try:
        async with asyncio.timeout(_DEADLINE):
            await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
        yield streams
        if ended := [task for task in tasks if task.done()]:
            raise NodeFailed(
                f"{len(ended)} of {_STREAMS} decoding requests ended too early: "
                "give a shorter --window"
            )
    finally:
        await _cancel_tasks(tasks)


async def _sample_window(streams: list[DecodeStream], seconds: float, decode: int) -> WindowSample:
    """Measure decode for `seconds`; `decode` is its pid. Raises NodeFailed for too few steps."""
    await asyncio.sleep(_SETTLE)
    began, used = time.perf_counter(), cpu_seconds(decode)
    await asyncio.sleep(seconds)
    ended, used = time.perf_counter(), cpu_seconds(decode) - used
    gaps = [gap for stream in streams for gap in stream.find_gaps(began, ended)]
    if len(gaps) < _MIN_STEPS:
        raise NodeFailed(f"{len(gaps)} decode steps seen in {seconds:g} s: give a longer --window")
    return WindowSample(percentile(gaps, 50), used * len(streams) / len(gaps))


async def _cancel_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _handed_over_bytes(cluster: cluster_pb2_grpc.ClusterStub, transport: str) -> float:
    """Return the bytes handed over so far, as the coordinator counts them."""
    status = await cluster.Status(cluster_pb2.StatusRequest())
    return float(status.counters.get(f'baton_handoff_bytes_total{{transport="{transport}"}}', 0.0))
