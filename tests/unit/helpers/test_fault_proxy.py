"""The proxy must do what chaos rounds believe it does."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.fault_proxy import BOTH_DIRECTIONS, Direction, FaultProxy, LinkConditions

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
TIMEOUT_SECONDS = 30.0
SHORT_WAIT_SECONDS = 0.2  # seconds in which what is not held back would have come through


@asynccontextmanager
async def proxied_echo_server() -> AsyncIterator[
    tuple[FaultProxy, Callable[[], Awaitable[Streams]]]
]:
    """A link to a server that sends back what it gets, and a way to dial it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = await FaultProxy.open("test", server.sockets[0].getsockname()[:2])
    opened: list[asyncio.StreamWriter] = []

    async def dial() -> Streams:
        end = await asyncio.open_connection(*link.address)
        opened.append(end[1])
        return end

    try:
        yield link, dial
    finally:
        for writer in opened:
            writer.close()
        await link.close()
        server.close()


async def exchange_bytes(end: Streams, data: bytes) -> bytes:
    reader, writer = end
    writer.write(data)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await reader.readexactly(len(data))


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(SHORT_WAIT_SECONDS):
            return await reader.read(1) is None
    except TimeoutError:
        return True


async def test_without_faults_bytes_pass_in_order() -> None:
    data = bytes(range(256)) * 4096
    async with proxied_echo_server() as (_, dial):
        assert await exchange_bytes(await dial(), data) == data


async def test_a_delay_shifts_both_ways_and_keeps_the_order() -> None:
    async with proxied_echo_server() as (link, dial):
        end = await dial()
        await exchange_bytes(end, b"up")
        link.set_conditions(BOTH_DIRECTIONS, LinkConditions(delay_seconds=0.1))
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await exchange_bytes(end, b"slow") == b"slow"
        assert loop.time() - began >= 0.2


@pytest.mark.parametrize("way", list(Direction))
async def test_blackhole_of_one_direction_loses_nothing(way: Direction) -> None:
    async with proxied_echo_server() as (link, dial):
        end = await dial()
        await exchange_bytes(end, b"up")
        link.set_conditions(way, LinkConditions(is_blocked=True))
        end[1].write(b"held")
        assert await is_silent(end[0])
        await link.heal()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await end[0].readexactly(4) == b"held"


async def test_a_black_hole_accepts_new_connections_and_answers_none() -> None:
    async with proxied_echo_server() as (link, dial):
        link.set_conditions(BOTH_DIRECTIONS, LinkConditions(is_blocked=True))
        reader, writer = await dial()
        writer.write(b"x")
        assert await is_silent(reader)


async def test_a_reset_ends_open_connections_and_takes_new_ones() -> None:
    async with proxied_echo_server() as (link, dial):
        reader, writer = await dial()
        await exchange_bytes((reader, writer), b"up")
        link.reset_connections()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await reader.read(1)
        assert await exchange_bytes(await dial(), b"again") == b"again"


async def test_a_reset_frees_what_a_black_hole_held() -> None:
    async with proxied_echo_server() as (link, dial):
        reader, writer = await dial()
        await exchange_bytes((reader, writer), b"up")
        link.set_conditions(BOTH_DIRECTIONS, LinkConditions(is_blocked=True))
        writer.write(b"held")
        link.reset_connections()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await reader.read(1)


async def test_stranded_connection_stays_dead_and_new_ones_work() -> None:
    async with proxied_echo_server() as (link, dial):
        reader, writer = await dial()
        await exchange_bytes((reader, writer), b"up")
        link.strand_connections()
        writer.write(b"held")
        assert await is_silent(reader)
        assert await exchange_bytes(await dial(), b"new") == b"new"
        await link.heal()
        assert await is_silent(reader)


async def test_connections_are_refused_until_healed() -> None:
    async with proxied_echo_server() as (link, dial):
        address = link.address
        await link.refuse_connections()
        with pytest.raises(ConnectionRefusedError):
            await dial()
        await link.heal()
        assert link.address == address
        assert await exchange_bytes(await dial(), b"back") == b"back"


async def test_half_closed_downstream_the_client_may_still_send() -> None:
    async with proxied_echo_server() as (link, dial):
        reader, writer = await dial()
        await exchange_bytes((reader, writer), b"up")
        link.half_close(Direction.DOWNSTREAM)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await reader.read(1) == b""
        writer.write(b"into the void")
        await writer.drain()
        assert link.open_connections == 1


async def test_half_closed_upstream_the_server_sees_the_end() -> None:
    async with proxied_echo_server() as (link, dial):
        reader, writer = await dial()
        await exchange_bytes((reader, writer), b"up")
        link.half_close(Direction.UPSTREAM)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await reader.read(1) == b""  # the echo server closes when its input ends


async def test_corruption_flips_one_bit_of_a_chunk() -> None:
    async with proxied_echo_server() as (link, dial):
        end = await dial()
        await exchange_bytes(end, b"up")
        link.set_conditions(Direction.UPSTREAM, LinkConditions(bit_flip_probability=1.0))
        got = await exchange_bytes(end, bytes(64))
        assert sum(byte.bit_count() for byte in got) == link.flipped_bits == 1


async def test_bandwidth_is_bounded() -> None:
    async with proxied_echo_server() as (link, dial):
        end = await dial()
        link.set_conditions(Direction.UPSTREAM, LinkConditions(bytes_per_second=100_000))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await exchange_bytes(end, bytes(20_000))
        assert loop.time() - began >= 0.2


async def test_missing_upstream_looks_like_a_reset() -> None:
    link = await FaultProxy.open("nowhere", ("127.0.0.1", 1))
    reader, writer = await asyncio.open_connection(*link.address)
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await reader.read(1)
    writer.close()
    await link.close()


@pytest.mark.parametrize("num_turns", range(14))
async def test_nothing_is_left_open_when_the_proxy_closes_while_it_is_dialled(
    num_turns: int,
) -> None:
    """`num_turns` of the event loop pass in between, so that each step of accepting is met."""
    gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        async with proxied_echo_server() as (link, _):
            dials = [asyncio.create_task(asyncio.open_connection(*link.address)) for _ in range(8)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await link.close()
            for dialled in await asyncio.gather(*dials, return_exceptions=True):
                if not isinstance(dialled, BaseException):
                    dialled[1].transport.abort()
            del dials, dialled
        await asyncio.sleep(0)
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


@pytest.mark.parametrize("num_turns", range(14))
async def test_a_connection_that_is_still_dialled_is_refused_as_well(num_turns: int) -> None:
    """`num_turns` of the event loop pass in between, so that each step of accepting is met."""
    async with proxied_echo_server() as (link, dial):
        dialling = asyncio.ensure_future(dial())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await link.refuse_connections()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await exchange_bytes(await dialling, b"1234")
