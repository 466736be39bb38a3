"""A TCP proxy for one link between two processes, which injects network faults on command.

The end that dials gets the proxy's address instead of the real one. `LinkConditions` say per
direction what happens to bytes, and may change at any time, for open connections too:

    proxy = await FaultProxy.open("prefill -> coordinator", ("127.0.0.1", port))
    proxy.set_conditions(Direction.UPSTREAM, LinkConditions(delay_seconds=0.2))
    proxy.set_conditions(BOTH_DIRECTIONS, LinkConditions(is_blocked=True))    # a black hole
    proxy.reset_connections()         # every connection ends with RST; new ones are accepted
    await proxy.refuse_connections()  # the same, and new ones are refused until heal()
    proxy.half_close(Direction.DOWNSTREAM)  # the dialler reads an end of file; it can still send
    proxy.strand_connections()        # open connections forward nothing any more; new ones do
    await proxy.heal()
    proxy.recorded_bytes = bytearray()  # from now on, what an eavesdropper hears in both directions

What a black hole holds back is forwarded when it ends, as TCP would do: a connection that survives
loses no bytes.
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
    """What happens to the bytes of one direction."""

    delay_seconds: float = 0.0  # added latency; the bandwidth stays
    bytes_per_second: float = 0.0  # bandwidth; 0 is unlimited
    bit_flip_probability: float = 0.0  # that one bit of a chunk is flipped
    is_blocked: bool = False  # everything is held back


NO_FAULTS = LinkConditions()


class FaultProxy:
    """The proxy of one link. See the module."""

    def __init__(self, name: str, upstream: Address, seed: int) -> None:
        self.name = name
        self.flipped_bits = 0  # bits flipped so far
        self.accepted_connections = 0  # connections so far
        self.recorded_bytes: bytearray | None = None  # all that passes, if not None
        self._upstream = upstream
        self._random = random.Random(seed)
        self._conditions = dict.fromkeys(Direction, NO_FAULTS)
        self._connections: set[_ProxiedConnection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._listening: socket.socket | None = None
        self.address: Address = ("127.0.0.1", 0)

    @classmethod
    async def open(cls, name: str, upstream: Address, seed: int = 0) -> "FaultProxy":
        """Listen on a free port of the loopback interface. Nothing needs to listen at `upstream`
        yet."""
        proxy = cls(name, upstream, seed)
        await proxy._listen()
        return proxy

    async def close(self) -> None:
        await self.refuse_connections()
        await asyncio.sleep(0)  # one that is cancelled before it begins would close nothing
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    # faults

    def set_conditions(
        self, directions: Direction | tuple[Direction, ...], conditions: LinkConditions
    ) -> None:
        for direction in (directions,) if isinstance(directions, Direction) else directions:
            self._conditions[direction] = conditions
        for connection in self._connections:
            connection.wake()

    def reset_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.reset()

    def half_close(self, direction: Direction) -> None:
        """End one direction of every open connection; the other goes on until an end closes it."""
        for connection in tuple(self._connections):
            connection.half_close(direction)

    def strand_connections(self) -> None:
        """Open connections stay and never forward anything again, as behind a router that has
        forgotten them."""
        for connection in self._connections:
            connection.strand()

    async def refuse_connections(self) -> None:
        """Stop listening and reset open connections, until `heal`."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        self.reset_connections()

    async def heal(self) -> None:
        """Remove all faults and listen again; stranded connections stay stranded."""
        self.set_conditions(BOTH_DIRECTIONS, NO_FAULTS)
        await self._listen()

    # inside

    async def _listen(self) -> None:
        """Accept connections here, because a closed asyncio.Server loses those it is accepting.

        So it is with Python 3.11.
        """
        if self._listening is None:
            self._listening = socket.create_server(self.address)
            self._listening.setblocking(False)
            self.address = self._listening.getsockname()[:2]
            asyncio.get_running_loop().add_reader(self._listening, self._accept_connection)

    def _accept_connection(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it was reset before
            return
        connection.setblocking(False)
        self.accepted_connections += 1
        handler = asyncio.create_task(self._handle_connection(connection, self._listening))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)

    async def _handle_connection(self, accepted: socket.socket, listening: socket.socket) -> None:
        """Serve a connection, which is reset if `listening` was closed before it was served."""
        try:
            dialler = await asyncio.open_connection(sock=accepted)
        except (OSError, asyncio.CancelledError):
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
            accepted.close()
            return
        try:
            upstream = await asyncio.open_connection(*self._upstream)
        except (OSError, asyncio.CancelledError):
            _close_with_reset(dialler[1])
            return
        connection = _ProxiedConnection(self, dialler, upstream)
        if self._listening is not listening:
            connection.reset()
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    def get_conditions(self, direction: Direction) -> LinkConditions:
        return self._conditions[direction]

    def corrupt_chunk(self, chunk: bytes, probability: float) -> bytes:
        if self._random.random() >= probability:
            return chunk
        self.flipped_bits += 1
        damaged = bytearray(chunk)
        damaged[self._random.randrange(len(chunk))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _ProxiedConnection:
    """An accepted connection and its upstream one, with a pump for each direction."""

    def __init__(self, proxy: FaultProxy, dialler: _Streams, listener: _Streams) -> None:
        self._proxy = proxy
        self._pumps = {
            Direction.UPSTREAM: _Pump(proxy, Direction.UPSTREAM, dialler[0], listener[1]),
            Direction.DOWNSTREAM: _Pump(proxy, Direction.DOWNSTREAM, listener[0], dialler[1]),
        }
        self._writers = (dialler[1], listener[1])
        self._reset_requested = asyncio.Event()

    async def run(self) -> None:
        """Return when both directions have ended, an end has broken, or `reset` was called."""
        pumping = asyncio.create_task(self._pump_all())
        reset = asyncio.create_task(self._reset_requested.wait())
        is_orderly = False
        try:
            await asyncio.wait({pumping, reset}, return_when=asyncio.FIRST_COMPLETED)
            is_orderly = pumping.done() and pumping.result() and not reset.done()
        finally:
            for writer in self._writers:
                writer.close() if is_orderly else _close_with_reset(writer)
            pumping.cancel()
            reset.cancel()
            await asyncio.gather(pumping, reset, return_exceptions=True)

    async def _pump_all(self) -> bool:
        """Run until both directions have ended; whether neither ended with an error."""
        is_orderly = True
        try:
            async with asyncio.TaskGroup() as group:
                for pump in self._pumps.values():
                    group.create_task(pump.run())
        except* OSError:
            is_orderly = False
        return is_orderly

    def wake(self) -> None:
        for pump in self._pumps.values():
            pump.wake()

    def reset(self) -> None:
        self._reset_requested.set()

    def half_close(self, direction: Direction) -> None:
        self._pumps[direction].close_sink()

    def strand(self) -> None:
        for pump in self._pumps.values():
            pump.is_stranded = True


class _Pump:
    """Reads chunks of one direction and forwards each when its delay is over."""

    def __init__(
        self,
        proxy: FaultProxy,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        self._proxy, self._direction, self._source, self._sink = proxy, direction, source, sink
        self._chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_BUFFERED_CHUNKS)
        self._changed = asyncio.Event()
        self._is_sink_closed = False
        self.is_stranded = False

    def wake(self) -> None:
        """Apply conditions that have changed."""
        self._changed.set()

    def close_sink(self) -> None:
        """Send an end of file to the sink; what still comes from the source is dropped."""
        if not self._is_sink_closed:
            self._is_sink_closed = True
            with contextlib.suppress(OSError, RuntimeError):
                self._sink.write_eof()

    async def run(self) -> None:
        """Forward the source until its end. Raises OSError (in a group) when an end breaks."""
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
            conditions = self._conditions
            if conditions.bytes_per_second:
                await asyncio.sleep(len(chunk) / conditions.bytes_per_second)
            if self._proxy.recorded_bytes is not None:
                self._proxy.recorded_bytes += chunk
            self._sink.write(self._proxy.corrupt_chunk(chunk, conditions.bit_flip_probability))
            await self._sink.drain()

    async def _wait_unblocked(self) -> None:
        while self._conditions.is_blocked or self.is_stranded:
            self._changed.clear()
            await self._changed.wait()

    @property
    def _conditions(self) -> LinkConditions:
        return self._proxy.get_conditions(self._direction)


def _close_with_reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
    writer.transport.abort()
