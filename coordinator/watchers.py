"""Cluster.Watch: the status again and again, to a bounded number of callers, and no faster than each of them asked."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable

from baton.errors import InvalidRequest, Overloaded
from baton.pb.cluster_pb2 import StatusResponse

MOST = 32  # callers at once
SHORTEST, DEFAULT, LONGEST = 0.1, 1.0, 60.0  # seconds between two answers
SILENCE = 5.0  # seconds after which an answer follows though nothing is known to have changed


class Watchers:
    """`changed` is to be called when the status may have changed."""

    def __init__(self, status: Callable[[], StatusResponse]) -> None:
        self._status = status
        self._callers: set[asyncio.Event] = set()
        self._over = asyncio.Event()

    def changed(self) -> None:
        for event in self._callers:
            event.set()

    def close(self) -> None:
        """Every watch ends."""
        self._over.set()
        self.changed()

    async def watch(self, interval: float) -> AsyncGenerator[StatusResponse, None]:
        """At once, then after every change, `interval` seconds apart at least (0: `DEFAULT`). Nothing is queued: who
        reads slowly gets the newest. Raises InvalidRequest, and Overloaded when `MOST` are watching already."""
        interval = interval or DEFAULT
        if not (math.isfinite(interval) and SHORTEST <= interval <= LONGEST):
            raise InvalidRequest(
                f"interval_seconds is {interval:g}: it must be {SHORTEST:g} to {LONGEST:g}", param="interval_seconds"
            )
        if len(self._callers) >= MOST:
            raise Overloaded(f"{MOST} callers watch this cluster, which is the most", retry_after=LONGEST)
        changed = asyncio.Event()
        self._callers.add(changed)
        try:
            while not self._over.is_set():
                changed.clear()
                yield self._status()
                await _within(interval, self._over)
                await _within(SILENCE, changed)
        finally:
            self._callers.discard(changed)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Until the event, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
