"""Send a plan to an endpoint: in a closed loop, as a Poisson process or as recorded.

The load is bounded in count and in time.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import ClosedLoop, PlannedRequest, PoissonArrivals
from benchmarks.load.traces import TraceReplay

UNFINISHED_ERROR = "unfinished"

LoadPattern = ClosedLoop | PoissonArrivals | TraceReplay


async def run_load(
    client: CompletionsClient, load: LoadPattern, plan: Sequence[PlannedRequest], seconds: float
) -> list[RequestMeasurement]:
    """Return a measurement for each request that was due within `seconds`.

    Requests that run when the time is up are cancelled and counted as unfinished.
    """
    measurements: list[RequestMeasurement] = []
    started = time.perf_counter()
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            if isinstance(load, ClosedLoop):
                remaining = iter(plan)
                for _ in range(load.concurrency):
                    group.create_task(_run_closed_loop_client(client, remaining, measurements))
            else:
                await _send_at_arrivals(client, plan, started, measurements, group)
    except TimeoutError:
        pass  # each cancelled request has recorded itself
    return measurements


async def _run_closed_loop_client(
    client: CompletionsClient,
    remaining: Iterator[PlannedRequest],
    measurements: list[RequestMeasurement],
) -> None:
    """Send the remaining requests one after another."""
    for request in remaining:
        await _measure_one(client, request, time.perf_counter(), measurements)


async def _send_at_arrivals(
    client: CompletionsClient,
    plan: Sequence[PlannedRequest],
    started: float,
    measurements: list[RequestMeasurement],
    group: asyncio.TaskGroup,
) -> None:
    for request in plan:
        due = started + request.start_seconds
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        group.create_task(_measure_one(client, request, due, measurements))


async def _measure_one(
    client: CompletionsClient,
    request: PlannedRequest,
    due: float,
    measurements: list[RequestMeasurement],
) -> None:
    try:
        measurements.append(await client.measure_request(request, due))
    except asyncio.CancelledError:
        cut = RequestMeasurement(
            due,
            request.output_tokens,
            requested_prompt_tokens=request.prompt_tokens,
            error=UNFINISHED_ERROR,
        )
        cut.ended_at = time.perf_counter()
        measurements.append(cut)
        raise
