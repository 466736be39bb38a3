"""gRPC's health and reflection services, which anybody may call, with bounds on the streams that
stay open."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

MAX_STREAMS_PER_CONNECTION, MAX_STREAMS = 16, 128  # at a time, of both services together
MAX_WATCH_SECONDS = 3600.0  # then a watcher is told to ask again
MAX_REFLECTION_SECONDS = 60.0

Context = Any  # grpc.aio.ServicerContext, which ships without types


class TooManyStreams(Exception):
    """With the bound that was reached."""


class StreamLimiter:
    """Counts the streams of one server."""

    def __init__(
        self, most: int = MAX_STREAMS, per_connection: int = MAX_STREAMS_PER_CONNECTION
    ) -> None:
        self._max_streams = most
        self._max_per_connection = per_connection
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    @contextmanager
    def open_stream(self, peer: str) -> Iterator[None]:
        """A stream of the connection that gRPC calls `peer`. Raises TooManyStreams."""
        if self._open[peer] >= self._max_per_connection:
            raise TooManyStreams(
                f"this connection has {self._max_per_connection} streams of health and reflection open"
            )
        if len(self) >= self._max_streams:
            raise TooManyStreams(f"{self._max_streams} streams of health and reflection are open")
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # drops who has none


class BoundedHealthServicer(health.aio.HealthServicer):
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
    """Put health and reflection on `server`, which also serves `services`. Returns the one that is
    told who is well."""
    streams = StreamLimiter()
    servicer = BoundedHealthServicer(streams)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        _BoundedReflectionServicer(names, streams), server
    )
    return servicer
