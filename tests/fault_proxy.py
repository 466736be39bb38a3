"""A TCP proxy for one link between two processes, in the test's own event loop, that misbehaves on command.

The end that dials is told the proxy's address instead of the real one. What happens to bytes is said per direction by
a `Weather` and may change at any time, for open connections too:

    link = await FaultyLink.open("prefill -> coordinator", ("127.0.0.1", port))
    link.weather(Way.THERE, Weather(delay=0.2))
    link.weather(BOTH, Weather(blocked=True))      a black hole: connections stay, nothing is handed on
    link.reset()                                   every connection ends with RST; new ones are accepted
    await link.refuse()                            and new ones are refused, until heal()
    link.half_close(Way.BACK)                      the dialler sees an end of file and can still send
    link.strand()                                  open connections hand nothing on any more; new ones are not concerned
    await link.heal()
    link.record = bytearray()                      what an eavesdropper hears, both ways, from now on

Bytes that a black hole holds are handed on when it ends, as TCP would: a connection that lives loses nothing.
"""

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from enum import Enum

_CHUNK = 1 << 16  # bytes read at once
_CHUNKS_HELD = 64  # per direction, then the sender feels back-pressure
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() sends RST

Address = tuple[str, int]


class Way(Enum):
    THERE = "there"  # from the end that dialled
    BACK = "back"


BOTH = (Way.THERE, Way.BACK)


@dataclass(frozen=True, slots=True)
class Weather:
    """`delay` in seconds, without loss of bandwidth; `bandwidth` in bytes per second, 0 is unlimited; `corrupt` is the
    probability that one bit of a chunk is flipped; `blocked` holds everything back."""

    delay: float = 0.0
    bandwidth: float = 0.0
    corrupt: float = 0.0
    blocked: bool = False


FAIR = Weather()


class FaultyLink:
    def __init__(self, name: str, upstream: Address, seed: int) -> None:
        self.name = name
        self.corrupted = 0  # bits flipped so far
        self.accepted = 0  # connections so far
        self.record: bytearray | None = None  # what passes, if somebody listens
        self._upstream = upstream
        self._random = random.Random(seed)
        self._weather = dict.fromkeys(Way, FAIR)
        self._connections: set[_Connection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address: Address = ("127.0.0.1", 0)

    @classmethod
    async def open(cls, name: str, upstream: Address, seed: int = 0) -> "FaultyLink":
        """Listen on a free port of the loopback interface. Nothing needs to listen at `upstream` yet."""
        link = cls(name, upstream, seed)
        await link._listen()
        return link

    async def close(self) -> None:
        await self.refuse()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def connections(self) -> int:
        return len(self._connections)

    # faults

    def weather(self, ways: Way | tuple[Way, ...], weather: Weather) -> None:
        for way in (ways,) if isinstance(ways, Way) else ways:
            self._weather[way] = weather
        for connection in self._connections:
            connection.wake()

    def reset(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()

    def half_close(self, way: Way) -> None:
        """End one direction of every open connection; the other goes on, until one side has had enough."""
        for connection in tuple(self._connections):
            connection.half_close(way)

    def strand(self) -> None:
        """Open connections stay and hand nothing on, for ever: as behind a router that has forgotten them."""
        for connection in self._connections:
            connection.strand()

    async def refuse(self) -> None:
        """Nothing listens here any more, and what was open is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()

    async def heal(self) -> None:
        self.weather(BOTH, FAIR)
        await self._listen()

    # inside

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accepted, *self.address)
            self.address = self._server.sockets[0].getsockname()[:2]

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.accepted += 1
        try:
            try:
                upstream = await asyncio.open_connection(*self._upstream)
            except OSError:
                _reset(writer)
                return
            connection = _Connection(self, (reader, writer), upstream)
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        finally:
            self._handlers.discard(task)

    def weather_of(self, way: Way) -> Weather:
        return self._weather[way]

    def damage(self, chunk: bytes, probability: float) -> bytes:
        if self._random.random() >= probability:
            return chunk
        self.corrupted += 1
        damaged = bytearray(chunk)
        damaged[self._random.randrange(len(chunk))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


_End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """Two pumps, one per direction. A pump takes chunks in and hands each on when its time has come."""

    def __init__(self, link: FaultyLink, dialler: _End, listener: _End) -> None:
        self._link = link
        self._pumps = {
            Way.THERE: _Pump(link, Way.THERE, dialler[0], listener[1]),
            Way.BACK: _Pump(link, Way.BACK, listener[0], dialler[1]),
        }
        self._writers = (dialler[1], listener[1])
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until both directions have ended, an end breaks, or `reset`."""
        pumping = asyncio.create_task(self._pump_all())
        over = asyncio.create_task(self._over.wait())
        in_order = False
        try:
            await asyncio.wait({pumping, over}, return_when=asyncio.FIRST_COMPLETED)
            in_order = pumping.done() and pumping.result() and not over.done()
        finally:
            pumping.cancel()
            over.cancel()
            await asyncio.gather(pumping, over, return_exceptions=True)
            for writer in self._writers:
                writer.close() if in_order else _reset(writer)

    async def _pump_all(self) -> bool:
        """Whether both directions ended in order."""
        broken = False
        try:
            async with asyncio.TaskGroup() as group:
                for pump in self._pumps.values():
                    group.create_task(pump.run())
        except* OSError:
            broken = True
        return not broken

    def wake(self) -> None:
        for pump in self._pumps.values():
            pump.wake()

    def reset(self) -> None:
        self._over.set()

    def half_close(self, way: Way) -> None:
        self._pumps[way].end()

    def strand(self) -> None:
        for pump in self._pumps.values():
            pump.stranded = True


class _Pump:
    def __init__(self, link: FaultyLink, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._link, self._way, self._source, self._sink = link, way, source, sink
        self._held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_HELD)
        self._changed = asyncio.Event()
        self._ended = False
        self.stranded = False

    def wake(self) -> None:
        """The weather has changed."""
        self._changed.set()

    def end(self) -> None:
        """Tell the sink that no more comes; whatever does come is thrown away."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(OSError, RuntimeError):
                self._sink.write_eof()

    async def run(self) -> None:
        """Until the source has ended and all of it is handed on. Raises OSError (in a group) when an end breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take())
            group.create_task(self._give())

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while chunk := await self._source.read(_CHUNK):
            await self._held.put((loop.time() + self._weather.delay, chunk))
        await self._held.put((loop.time() + self._weather.delay, b""))

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, chunk = await self._held.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._until_clear()
            if not chunk:
                self.end()
                return
            if self._ended:
                continue
            weather = self._weather
            if weather.bandwidth:
                await asyncio.sleep(len(chunk) / weather.bandwidth)
            if self._link.record is not None:
                self._link.record += chunk
            self._sink.write(self._link.damage(chunk, weather.corrupt))
            await self._sink.drain()

    async def _until_clear(self) -> None:
        while self._weather.blocked or self.stranded:
            self._changed.clear()
            await self._changed.wait()

    @property
    def _weather(self) -> Weather:
        return self._link.weather_of(self._way)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()
