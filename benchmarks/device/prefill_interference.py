"""Streams that decode while long prompts arrive without a pause: the load, and its figures."""

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.slo import Slo
from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.measurement import CellResult, RequestMeasurement, evaluate_cell
from benchmarks.load.request_plan import (
    ClosedLoop,
    LengthDistribution,
    PlannedRequest,
    plan_requests,
)
from benchmarks.load.run_load import run_load

_NO_SLO = Slo(None, None)
_LEAD_SECONDS = 0.5  # long prompts arrive for so long before the first stream is sent
_WAVES = 3  # requests of each client of the streams


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    """Streams in a closed loop, and long prompts beside them."""

    concurrency: int  # of the streams
    long_prompts: int  # in flight at every moment
    prompt_tokens: int = 128  # of a stream
    output_tokens: int = 256
    long_prompt_tokens: int = 8192
    # Of a long prompt: enough that it is handed over where prefill and decode are apart.
    long_output_tokens: int = 2

    def divide_by(self, parts: int) -> "InterferenceLoad":
        """The load of one of several servers that share it."""
        return InterferenceLoad(
            self.concurrency // parts,
            max(1, self.long_prompts // parts),
            self.prompt_tokens,
            self.output_tokens,
            self.long_prompt_tokens,
            self.long_output_tokens,
        )


@dataclass(frozen=True, slots=True)
class StreamLatencies:
    """Latencies and rates of the streams in one window. Times are in seconds."""

    tpot_p50: float
    tpot_p99: float  # of requests
    gap_p99: float  # between two tokens
    longest_gap: float
    tokens_per_second: float  # of all streams
    long_prompts_per_second: float  # that were answered meanwhile
    errors: int


@dataclass(frozen=True, slots=True)
class InterferenceFigures:
    """Windows without and with long prompts: medians over the rounds."""

    rounds: int
    idle: StreamLatencies
    busy: StreamLatencies

    @property
    def tpot_ratio(self) -> float:
        """TPOT p99 beside long prompts over that without them."""
        return self.busy.tpot_p99 / self.idle.tpot_p99


def combine_windows(
    idle: Sequence[StreamLatencies], busy: Sequence[StreamLatencies]
) -> InterferenceFigures:
    return InterferenceFigures(len(busy), _take_medians(idle), _take_medians(busy))


def _take_medians(windows: Sequence[StreamLatencies]) -> StreamLatencies:
    def median(name: str) -> float:
        values: list[float] = [getattr(window, name) for window in windows]
        return statistics.median(values)

    return StreamLatencies(
        median("tpot_p50"),
        median("tpot_p99"),
        median("gap_p99"),
        median("longest_gap"),
        median("tokens_per_second"),
        median("long_prompts_per_second"),
        sum(window.errors for window in windows),
    )


async def measure_streams(
    client: CompletionsClient, load: InterferenceLoad, seed: str, seconds: float, *, busy: bool
) -> StreamLatencies:
    """Send the streams, with long prompts beside them if `busy`.

    No garbage is collected here meanwhile: that would look like a pause of the server. Raises
    ValueError if no stream had an answer within `seconds`.
    """
    gc.disable()
    try:
        return await _measure_window(client, load, seed, seconds, busy=busy)
    finally:
        gc.enable()


async def _measure_window(
    client: CompletionsClient, load: InterferenceLoad, seed: str, seconds: float, *, busy: bool
) -> StreamLatencies:
    plan = plan_requests(
        ClosedLoop(load.concurrency),
        LengthDistribution("fixed", load.prompt_tokens),
        LengthDistribution("fixed", load.output_tokens),
        _WAVES * load.concurrency,
        seed,
    )
    if not busy:
        measured = await run_load(client, ClosedLoop(load.concurrency), plan, seconds)
        return _summarize(evaluate_cell("idle", measured, _NO_SLO), 0.0, 0)
    answered: list[RequestMeasurement] = []
    async with _sending_long_prompts(client, load, seed, answered):
        await asyncio.sleep(_LEAD_SECONDS)
        started, before = time.perf_counter(), len(answered)
        measured = await run_load(client, ClosedLoop(load.concurrency), plan, seconds)
        rate = (len(answered) - before) / (time.perf_counter() - started)
    errors = sum(bool(one.error) for one in answered)
    return _summarize(evaluate_cell("busy", measured, _NO_SLO), rate, errors)


@asynccontextmanager
async def _sending_long_prompts(
    client: CompletionsClient, load: InterferenceLoad, seed: str, answered: list[RequestMeasurement]
) -> AsyncIterator[None]:
    """Keep so many long prompts in flight; those that have ended are appended to `answered`."""

    async def send_prompts(number: int) -> None:
        for turn in range(1 << 20):
            request = PlannedRequest(
                0.0,
                load.long_prompt_tokens,
                load.long_output_tokens,
                turn,
                salt=f"{seed}/long/{number}",
            )
            answered.append(await client.measure_request(request, time.perf_counter()))

    tasks = [asyncio.create_task(send_prompts(number)) for number in range(load.long_prompts)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _summarize(
    cell: CellResult, long_prompts_per_second: float, long_prompt_errors: int
) -> StreamLatencies:
    if cell.tpot is None or cell.itl is None:
        raise ValueError(f"no stream had an answer: {cell.error_counts}")
    return StreamLatencies(
        cell.tpot.p50,
        cell.tpot.p99,
        cell.itl.p99,
        cell.itl.max,
        cell.tokens_per_second,
        long_prompts_per_second,
        sum(cell.error_counts.values()) + long_prompt_errors,
    )
