"""Streams the cluster's status to a bounded number of watchers (Cluster.Watch)."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable

from baton.errors import InvalidRequest, Overloaded
from baton.pb.cluster_pb2 import StatusResponse

MAX_WATCHERS = 32  # concurrent
MIN_INTERVAL_SECONDS, DEFAULT_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.1, 1.0, 60.0
MAX_SILENCE_SECONDS = 5.0  # after which the status is sent although no change is known


class StatusWatchers:
    """Sends the status to watchers. Call `notify_change` when it may have changed."""

    def __init__(self, status: Callable[[], StatusResponse]) -> None:
        self._status = status
        self._callers: set[asyncio.Event] = set()
        self._closed = asyncio.Event()

    def notify_change(self) -> None:
        for event in self._callers:
            event.set()

    def close(self) -> None:
        """End every watch."""
        self._closed.set()
        self.notify_change()

    async def watch_status(self, interval: float) -> AsyncGenerator[StatusResponse, None]:
        """Yield the status at once, then after changes, at least `interval` seconds apart.

        An interval of 0 is `DEFAULT_INTERVAL_SECONDS`. Nothing is queued: a slow reader gets the
        newest status. Raises InvalidRequest, and Overloaded if there are `MAX_WATCHERS` already.
        """
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
                f"{MAX_WATCHERS} callers watch this cluster, which is the limit",
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
    """Wait for the event, for at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
