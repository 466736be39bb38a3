"""A TCP proxy for one link between two processes, in the test's own event loop, that misbehaves on
command.

The end that dials is told the proxy's address instead of the real one. What happens to bytes is
said per direction by a `LinkConditions` and may change at any time, for open connections too:

    link = await FaultyLink.open("prefill -> coordinator", ("127.0.0.1", port))
    link.weather(Way.THERE, Weather(delay=0.2))
    link.weather(BOTH, Weather(blocked=True))      a black hole: connections stay, nothing is handed on
    link.reset()                                   every connection ends with RST; new ones are accepted
    await link.refuse()                            and new ones are refused, until heal()
    link.half_close(Way.BACK)                      the dialler sees an end of file and can still send
    link.strand()                                  open connections hand nothing on any more; new ones are not concerned
    await link.heal()
    link.record = bytearray()                      what an eavesdropper hears, both ways, from now on

Bytes that a black hole holds are handed on when it ends, as TCP would: a connection that lives
loses nothing.
"""

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass
from enum import Enum

_READ_BYTES = 1 << 16  # bytes read at once
_MAX_BUFFERED_CHUNKS = 64  # per direction, then the sender feels back-pressure
_LINGER_ZERO = struct.pack("ii", 1, 0)  # close() sends RST

Address = tuple[str, int]


class Direction(Enum):
    UPSTREAM = "there"  # from the end that dialled
    DOWNSTREAM = "back"


BOTH_DIRECTIONS = (Direction.UPSTREAM, Direction.DOWNSTREAM)


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """`delay_seconds` in seconds, without loss of bandwidth; `bytes_per_second` in bytes per
    second, 0 is unlimited; `bit_flip_probability` is the probability that one bit of a chunk is
    flipped; `is_blocked` holds everything back."""

    delay_seconds: float = 0.0
    bytes_per_second: float = 0.0
    bit_flip_probability: float = 0.0
    is_blocked: bool = False


NO_FAULTS = LinkConditions()


class FaultProxy:
    def __init__(self, name: str, upstream: Address, seed: int) -> None:
        self.name = name
        self.flipped_bits = 0  # bits flipped so far
        self.accepted_connections = 0  # connections so far
        self.recorded_bytes: bytearray | None = None  # what passes, if somebody listens
        self._upstream = upstream
        self._random = random.Random(seed)
        self._conditions = dict.fromkeys(Direction, NO_FAULTS)
        self._connections: set[_ProxiedConnection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address: Address = ("127.0.0.1", 0)

    @classmethod
    async def open(cls, name: str, upstream: Address, seed: int = 0) -> "FaultProxy":
        """Listen on a free port of the loopback interface. Nothing needs to listen at `upstream`
        yet."""
        link = cls(name, upstream, seed)
        await link._listen()
        return link

    async def close(self) -> None:
        await self.refuse_connections()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    # faults

    def set_conditions(
        self, ways: Direction | tuple[Direction, ...], weather: LinkConditions
    ) -> None:
        for way in (ways,) if isinstance(ways, Direction) else ways:
            self._conditions[way] = weather
        for connection in self._connections:
            connection.wake()

    def reset_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()

    def half_close(self, way: Direction) -> None:
        """End one direction of every open connection; the other goes on, until one side has had
        enough."""
        for connection in tuple(self._connections):
            connection.half_close(way)

    def strand_connections(self) -> None:
        """Open connections stay and hand nothing on, for ever: as behind a router that has
        forgotten them."""
        for connection in self._connections:
            connection.strand()

    async def refuse_connections(self) -> None:
        """Nothing listens here any more, and what was open is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset_connections()

    async def heal(self) -> None:
        self.set_conditions(BOTH_DIRECTIONS, NO_FAULTS)
        await self._listen()

    # inside

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._on_connection, *self.address)
            self.address = self._server.sockets[0].getsockname()[:2]

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.accepted_connections += 1
        try:
            try:
                upstream = await asyncio.open_connection(*self._upstream)
            except OSError:
                _close_with_reset(writer)
                return
            connection = _ProxiedConnection(self, (reader, writer), upstream)
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        finally:
            self._handlers.discard(task)

    def get_conditions(self, way: Direction) -> LinkConditions:
        return self._conditions[way]

    def corrupt_chunk(self, chunk: bytes, probability: float) -> bytes:
        if self._random.random() >= probability:
            return chunk
        self.flipped_bits += 1
        damaged = bytearray(chunk)
        damaged[self._random.randrange(len(chunk))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _ProxiedConnection:
    """Two pumps, one per direction. A pump takes chunks in and hands each on when its time has
    come."""

    def __init__(self, link: FaultProxy, dialler: _Streams, listener: _Streams) -> None:
        self._link = link
        self._pumps = {
            Direction.UPSTREAM: _Pump(link, Direction.UPSTREAM, dialler[0], listener[1]),
            Direction.DOWNSTREAM: _Pump(link, Direction.DOWNSTREAM, listener[0], dialler[1]),
        }
        self._writers = (dialler[1], listener[1])
        self._reset_requested = asyncio.Event()

    async def run(self) -> None:
        """Until both directions have ended, an end breaks, or `reset`."""
        pumping = asyncio.create_task(self._pump_all())
        over = asyncio.create_task(self._reset_requested.wait())
        in_order = False
        try:
            await asyncio.wait({pumping, over}, return_when=asyncio.FIRST_COMPLETED)
            in_order = pumping.done() and pumping.result() and not over.done()
        finally:
            pumping.cancel()
            over.cancel()
            await asyncio.gather(pumping, over, return_exceptions=True)
            for writer in self._writers:
                writer.close() if in_order else _close_with_reset(writer)

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
        self._reset_requested.set()

    def half_close(self, way: Direction) -> None:
        self._pumps[way].close_sink()

    def strand(self) -> None:
        for pump in self._pumps.values():
            pump.is_stranded = True


class _Pump:
    def __init__(
        self,
        link: FaultProxy,
        way: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        self._link, self._way, self._source, self._sink = link, way, source, sink
        self._chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_BUFFERED_CHUNKS)
        self._changed = asyncio.Event()
        self._is_sink_closed = False
        self.is_stranded = False

    def wake(self) -> None:
        """The weather has changed."""
        self._changed.set()

    def close_sink(self) -> None:
        """Tell the sink that no more comes; whatever does come is thrown away."""
        if not self._is_sink_closed:
            self._is_sink_closed = True
            with contextlib.suppress(OSError, RuntimeError):
                self._sink.write_eof()

    async def run(self) -> None:
        """Until the source has ended and all of it is handed on. Raises OSError (in a group) when
        an end breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_chunks())
            group.create_task(self._write_chunks())

    async def _read_chunks(self) -> None:
        loop = asyncio.get_running_loop()
        while chunk := await self._source.read(_READ_BYTES):
            await self._chunks.put((loop.time() + self._conditions.delay_seconds, chunk))
        await self._chunks.put((loop.time() + self._conditions.delay_seconds, b""))

    async def _write_chunks(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, chunk = await self._chunks.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._wait_unblocked()
            if not chunk:
                self.close_sink()
                return
            if self._is_sink_closed:
                continue
            weather = self._conditions
            if weather.bytes_per_second:
                await asyncio.sleep(len(chunk) / weather.bytes_per_second)
            if self._link.recorded_bytes is not None:
                self._link.recorded_bytes += chunk
            self._sink.write(self._link.corrupt_chunk(chunk, weather.bit_flip_probability))
            await self._sink.drain()

    async def _wait_unblocked(self) -> None:
        while self._conditions.is_blocked or self.is_stranded:
            self._changed.clear()
            await self._changed.wait()

    @property
    def _conditions(self) -> LinkConditions:
        return self._link.get_conditions(self._way)


def _close_with_reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()
