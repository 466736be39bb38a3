"""The proxy must do what chaos rounds believe it does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.fault_proxy import BOTH, FaultyLink, Way, Weather

End = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENCE = 30.0
SOON = 0.2  # seconds in which what is not held back would have come through


@asynccontextmanager
async def echo_link() -> AsyncIterator[tuple[FaultyLink, Callable[[], Awaitable[End]]]]:
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
    link = await FaultyLink.open("test", server.sockets[0].getsockname()[:2])
    opened: list[asyncio.StreamWriter] = []

    async def dial() -> End:
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


async def exchanged(end: End, data: bytes) -> bytes:
    reader, writer = end
    writer.write(data)
    async with asyncio.timeout(PATIENCE):
        return await reader.readexactly(len(data))


async def nothing_comes(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(SOON):
            return await reader.read(1) is None
    except TimeoutError:
        return True


async def test_fair_weather_hands_everything_on_in_order() -> None:
    data = bytes(range(256)) * 4096
    async with echo_link() as (_, dial):
        assert await exchanged(await dial(), data) == data


async def test_a_delay_shifts_both_ways_and_keeps_the_order() -> None:
    async with echo_link() as (link, dial):
        end = await dial()
        await exchanged(end, b"up")
        link.weather(BOTH, Weather(delay=0.1))
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await exchanged(end, b"slow") == b"slow"
        assert loop.time() - began >= 0.2


@pytest.mark.parametrize("way", list(Way))
async def test_a_black_hole_holds_one_way_and_loses_nothing(way: Way) -> None:
    async with echo_link() as (link, dial):
        end = await dial()
        await exchanged(end, b"up")
        link.weather(way, Weather(blocked=True))
        end[1].write(b"held")
        assert await nothing_comes(end[0])
        await link.heal()
        async with asyncio.timeout(PATIENCE):
            assert await end[0].readexactly(4) == b"held"


async def test_a_black_hole_accepts_new_connections_and_answers_none() -> None:
    async with echo_link() as (link, dial):
        link.weather(BOTH, Weather(blocked=True))
        reader, writer = await dial()
        writer.write(b"x")
        assert await nothing_comes(reader)


async def test_a_reset_ends_open_connections_and_takes_new_ones() -> None:
    async with echo_link() as (link, dial):
        reader, writer = await dial()
        await exchanged((reader, writer), b"up")
        link.reset()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(PATIENCE):
                await reader.read(1)
        assert await exchanged(await dial(), b"again") == b"again"


async def test_a_reset_frees_what_a_black_hole_held() -> None:
    async with echo_link() as (link, dial):
        reader, writer = await dial()
        await exchanged((reader, writer), b"up")
        link.weather(BOTH, Weather(blocked=True))
        writer.write(b"held")
        link.reset()
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(PATIENCE):
                await reader.read(1)


async def test_a_stranded_connection_stays_so_and_new_ones_do_not_care() -> None:
    async with echo_link() as (link, dial):
        reader, writer = await dial()
        await exchanged((reader, writer), b"up")
        link.strand()
        writer.write(b"held")
        assert await nothing_comes(reader)
        assert await exchanged(await dial(), b"new") == b"new"
        await link.heal()
        assert await nothing_comes(reader)


async def test_refused_until_healed_at_the_same_address() -> None:
    async with echo_link() as (link, dial):
        address = link.address
        await link.refuse()
        with pytest.raises(ConnectionRefusedError):
            await dial()
        await link.heal()
        assert link.address == address
        assert await exchanged(await dial(), b"back") == b"back"


async def test_half_closed_back_the_dialler_sees_the_end_and_may_still_send() -> None:
    async with echo_link() as (link, dial):
        reader, writer = await dial()
        await exchanged((reader, writer), b"up")
        link.half_close(Way.BACK)
        async with asyncio.timeout(PATIENCE):
            assert await reader.read(1) == b""
        writer.write(b"into the void")
        await writer.drain()
        assert link.connections == 1


async def test_half_closed_there_the_listener_sees_the_end() -> None:
    async with echo_link() as (link, dial):
        reader, writer = await dial()
        await exchanged((reader, writer), b"up")
        link.half_close(Way.THERE)
        async with asyncio.timeout(PATIENCE):
            assert await reader.read(1) == b""  # the echo server closes when its input ends


async def test_corruption_flips_one_bit_of_a_chunk() -> None:
    async with echo_link() as (link, dial):
        end = await dial()
        await exchanged(end, b"up")
        link.weather(Way.THERE, Weather(corrupt=1.0))
        got = await exchanged(end, bytes(64))
        assert sum(byte.bit_count() for byte in got) == link.corrupted == 1


async def test_bandwidth_is_bounded() -> None:
    async with echo_link() as (link, dial):
        end = await dial()
        link.weather(Way.THERE, Weather(bandwidth=100_000))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await exchanged(end, bytes(20_000))
        assert loop.time() - began >= 0.2


async def test_nothing_listening_behind_it_looks_like_a_reset() -> None:
    link = await FaultyLink.open("nowhere", ("127.0.0.1", 1))
    reader, writer = await asyncio.open_connection(*link.address)
    with pytest.raises(ConnectionResetError):
        async with asyncio.timeout(PATIENCE):
            await reader.read(1)
    writer.close()
    await link.close()
