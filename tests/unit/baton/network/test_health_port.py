"""A node's health port: serving, shutdown, bounds of its streams."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network.health_port import NO_PORT, HealthPort
from baton.network.health_service import MAX_STREAMS_PER_CONNECTION, StreamLimiter, TooManyStreams

CHECK = health_pb2.HealthCheckRequest()
KINDS = health_pb2.HealthCheckResponse


@asynccontextmanager
async def serving() -> AsyncIterator[HealthPort]:
    health = HealthPort(Config())
    await health.start()
    gc.collect()
    try:
        yield health
    finally:
        await health.stop()


async def test_health_is_not_serving_after_announced_shutdown() -> None:
    async with (
        serving() as health,
        grpc.aio.insecure_channel(f"127.0.0.1:{health.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(CHECK, timeout=30)).status == KINDS.SERVING
        await health.announce_shutdown()
        assert (await stub.Check(CHECK, timeout=30)).status == KINDS.NOT_SERVING


async def test_reflection_lists_services() -> None:
    async with (
        serving() as health,
        grpc.aio.insecure_channel(f"127.0.0.1:{health.port}") as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=30)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        call.cancel()
    assert "grpc.health.v1.Health" in {
        service.name for service in answer.list_services_response.service
    }


@pytest.mark.slow
async def test_watches_of_one_connection_are_bounded() -> None:
    async with (
        serving() as health,
        grpc.aio.insecure_channel(f"127.0.0.1:{health.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(CHECK, timeout=60) for _ in range(5000)]
        answers = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        codes = {
            answer.code() for answer in refused
        }  # of ours, and of HTTP/2 beyond its streams for a connection
        assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert len(calls) - len(refused) == MAX_STREAMS_PER_CONNECTION
        assert (await stub.Check(CHECK, timeout=30)).status == KINDS.SERVING
        for call in calls:
            call.cancel()


async def test_watches_of_a_server_are_bounded_and_end_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.network.health_service.MAX_WATCH_SECONDS", 0.05)
    streams = StreamLimiter(max_streams=2, per_connection=2)
    with (
        streams.open_stream("a"),
        streams.open_stream("b"),
        pytest.raises(TooManyStreams),
        streams.open_stream("c"),
    ):
        pass
    assert len(streams) == 0
    async with (
        serving() as health,
        grpc.aio.insecure_channel(f"127.0.0.1:{health.port}") as channel,
    ):
        call = health_pb2_grpc.HealthStub(channel).Watch(CHECK, timeout=60)
        assert (await call.read()).status == KINDS.SERVING
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_in_use_is_a_config_error() -> None:
    async with serving() as health:
        with pytest.raises(ConfigError, match="--health-port"):
            await HealthPort(Config(health_port=health.port)).start()


async def test_no_port_is_opened_without_one() -> None:
    health = HealthPort(Config(health_port=NO_PORT))
    await health.start()
    assert health.port == NO_PORT
    await health.stop()
