"""Sends a plan to an endpoint, in a closed loop, as a Poisson process or as recorded, bounded in count and in time."""

import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks.completions import Client
from benchmarks.measurement import Measurement
from benchmarks.schedule import Closed, Planned, Poisson
from benchmarks.traces import Replay

UNFINISHED = "unfinished"

Load = Closed | Poisson | Replay


async def drive(client: Client, load: Load, plan: Sequence[Planned], seconds: float) -> list[Measurement]:
    """One measurement per request that was due within `seconds`. What runs when the time is up is cut off and counted
    as unfinished."""
    seen: list[Measurement] = []
    started = time.perf_counter()
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            if isinstance(load, Closed):
                rest = iter(plan)
                for _ in range(load.concurrency):
                    group.create_task(_lane(client, rest, seen))
            else:
                await _arrivals(client, plan, started, seen, group)
    except TimeoutError:
        pass  # each request cut off has recorded itself
    return seen


async def _lane(client: Client, rest: Iterator[Planned], seen: list[Measurement]) -> None:
    """One client of a closed loop."""
    for request in rest:
        await _one(client, request, time.perf_counter(), seen)


async def _arrivals(
    client: Client, plan: Sequence[Planned], started: float, seen: list[Measurement], group: asyncio.TaskGroup
) -> None:
    for request in plan:
        due = started + request.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        group.create_task(_one(client, request, due, seen))


async def _one(client: Client, request: Planned, due: float, seen: list[Measurement]) -> None:
    try:
        seen.append(await client.measure(request, due))
    except asyncio.CancelledError:
        cut = Measurement(due, request.output_tokens, asked_prompt=request.prompt_tokens, error=UNFINISHED)
        cut.ended = time.perf_counter()
        seen.append(cut)
        raise
