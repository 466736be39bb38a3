"""Cluster.Watch: the status again and again, to a bounded number of callers, and no faster than
each of them asked."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable

from baton.errors import InvalidRequest, Overloaded
from baton.pb.cluster_pb2 import StatusResponse

MAX_WATCHERS = 32  # callers at once
MIN_INTERVAL_SECONDS, DEFAULT_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = (
    0.1,
    1.0,
    60.0,
)  # seconds between two answers
MAX_SILENCE_SECONDS = (
    5.0  # seconds after which an answer follows though nothing is known to have changed
)


class StatusWatchers:
    """`notify_change` is to be called when the status may have changed."""

    def __init__(self, status: Callable[[], StatusResponse]) -> None:
        self._status = status
        self._callers: set[asyncio.Event] = set()
        self._closed = asyncio.Event()

    def notify_change(self) -> None:
        for event in self._callers:
            event.set()

    def close(self) -> None:
        """Every watch ends."""
        self._closed.set()
        self.notify_change()

    async def watch_status(self, interval: float) -> AsyncGenerator[StatusResponse, None]:
        """At once, then after every change, `interval` seconds apart at least (0:
        `DEFAULT_INTERVAL_SECONDS`). Nothing is queued: who reads slowly gets the newest. Raises
        InvalidRequest, and Overloaded when `MOST` are watching already."""
        interval = interval or DEFAULT_INTERVAL_SECONDS
        if not (
            math.isfinite(interval) and MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS
        ):
            raise InvalidRequest(
                f"interval_seconds is {interval:g}: it must be {MIN_INTERVAL_SECONDS:g} to "
                f"{MAX_INTERVAL_SECONDS:g}",
                param="interval_seconds",
            )
        if len(self._callers) >= MAX_WATCHERS:
            raise Overloaded(
                f"{MAX_WATCHERS} callers watch this cluster, which is the most",
                retry_after=MAX_INTERVAL_SECONDS,
            )
        changed = asyncio.Event()
        self._callers.add(changed)
        try:
            while not self._closed.is_set():
                changed.clear()
                yield self._status()
                await _wait_at_most(interval, self._closed)
                await _wait_at_most(MAX_SILENCE_SECONDS, changed)
        finally:
            self._callers.discard(changed)


async def _wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Until the event, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
