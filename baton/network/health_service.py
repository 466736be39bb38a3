"""gRPC's health and reflection services with bounds on open streams.

They need no key, so any client may call them.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

MAX_STREAMS_PER_CONNECTION, MAX_STREAMS = 16, 128  # open at once, of both services together
MAX_WATCH_SECONDS = 3600.0  # after which a watcher gets UNAVAILABLE and must watch again
MAX_REFLECTION_SECONDS = 60.0

Context = Any  # grpc.aio.ServicerContext, which ships without types


class TooManyStreams(Exception):
    """A bound of open streams is reached. The message names it."""


class StreamLimiter:
    """Counts and bounds the open streams of one server."""

    def __init__(
        self, max_streams: int = MAX_STREAMS, per_connection: int = MAX_STREAMS_PER_CONNECTION
    ) -> None:
        self._max_streams = max_streams
        self._max_per_connection = per_connection
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    @contextmanager
    def open_stream(self, peer: str) -> Iterator[None]:
        """Count a stream of the connection `peer` while it is open. Raises TooManyStreams."""
        if self._open[peer] >= self._max_per_connection:
            raise TooManyStreams(
                f"this connection has {self._max_per_connection} streams "
                "of health and reflection open"
            )
        if len(self) >= self._max_streams:
            raise TooManyStreams(f"{self._max_streams} streams of health and reflection are open")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # removes peers without streams


class BoundedHealthServicer(health.aio.HealthServicer):
    """The standard health service with bounded watches."""

    def __init__(self, streams: StreamLimiter) -> None:
        super().__init__()
        self._streams = streams

    async def Watch(self, request: Any, context: Context) -> None:
        try:
            with self._streams.open_stream(context.peer()):
                async with asyncio.timeout(MAX_WATCH_SECONDS):
                    await super().Watch(request, context)
        except TooManyStreams as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"a watch ends after {MAX_WATCH_SECONDS:g} s: watch again",
            )


class _BoundedReflectionServicer(reflection.aio.ReflectionServicer):
    def __init__(self, services: tuple[str, ...], streams: StreamLimiter) -> None:
        super().__init__(services)
        self._streams = streams

    async def ServerReflectionInfo(self, requests: Any, context: Context) -> None:
        try:
            with self._streams.open_stream(context.peer()):
                async with asyncio.timeout(MAX_REFLECTION_SECONDS):
                    async for answer in super().ServerReflectionInfo(requests, context):
                        await context.write(answer)
        except TooManyStreams as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"reflection ends after {MAX_REFLECTION_SECONDS:g} s"
            )


def add_health_service(server: grpc.aio.Server, *services: str) -> BoundedHealthServicer:
    """Add health and reflection to `server`, which also serves `services`.

    Returns the health servicer, on which the caller sets the status of services.
    """
    streams = StreamLimiter()
    servicer = BoundedHealthServicer(streams)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        _BoundedReflectionServicer(names, streams), server
    )
    return servicer
