"""What the bodies of requests may hold while they arrive and are decoded: bounded in number, bytes and time.

Small bodies, large ones and those over gRPC have room of their own, so that none of them takes that of another kind.
Who finds no room waits for a moment. A body that has been arriving for longer than most ever do gives up its room to
one that comes, so that nobody is kept out by clients that send half a body and no more.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.limits import (
    MAX_BODY_BYTES,
    MAX_GRPC_BODIES,
    MAX_LARGE_BODIES_BYTES,
    MAX_SMALL_BODIES,
    MAX_SMALL_BODY,
)

PATIENCE = 1.0  # seconds for which a body waits for room
DISPLACED_AFTER = 2.0  # seconds of arriving after which a body gives way to one that waits
_RETRY = 1.0  # seconds


@dataclass(eq=False, slots=True)
class ArrivingBody:
    """One body, and the bytes that are kept for it. `timer` is that of whoever reads it, until it is complete."""

    room: "BodyRoom"
    size: int
    since: float
    timer: asyncio.Timeout | None = None
    displaced: bool = False

    def reading(self, timer: asyncio.Timeout) -> None:
        """From now on it is arriving, and can be displaced: then the timer ends it at once."""
        self.timer = timer

    def complete(self) -> None:
        self.timer = None

    def grow(self, size: int) -> None:
        """It is `size` bytes now, without having said so before. Raises Overloaded."""
        self.room.grow(self, size)

    def refusal(self) -> Overloaded:
        """What the client of a body that was displaced is told."""
        return Overloaded(f"{self.room.what} came while this one was still arriving: send it again", retry_after=_RETRY)


class BodyRoom:
    """Room for bodies of one kind. All on one event loop."""

    def __init__(self, what: str, most: int, most_bytes: int) -> None:
        self.what = what
        self.bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._bodies: dict[ArrivingBody, None] = {}  # the oldest first
        self._waiting: deque[tuple[int, asyncio.Future[ArrivingBody]]] = deque()

    def __len__(self) -> int:
        return len(self._bodies)

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[ArrivingBody]:
        """Room for `size` bytes, for as long as the block runs. Raises Overloaded if there is none for a second."""
        body = await self._wait(size) if self._waiting or not self._make_room(size) else self._add(size)
        try:
            yield body
        finally:
            self._release(body)

    def grow(self, body: ArrivingBody, size: int) -> None:
        """See `ArrivingBody.grow`."""
        more = size - body.size
        if more <= 0 or body.displaced:
            return
        if self.bytes + more > self._most_bytes:
            raise self._full(more)
        body.size = size
        self.bytes += more

    def _fits(self, size: int) -> bool:
        return len(self._bodies) < self._most and self.bytes + size <= self._most_bytes

    def _make_room(self, size: int) -> bool:
        """Displace the oldest of those that have been arriving for too long, if that is what it takes."""
        now = asyncio.get_running_loop().time()
        overdue = [body for body in self._bodies if body.timer is not None and now - body.since >= DISPLACED_AFTER]
        for body in overdue:
            if self._fits(size):
                break
            assert body.timer is not None
            body.displaced = True
            body.timer.reschedule(now)
            self._release(body)
        return self._fits(size)

    async def _wait(self, size: int) -> ArrivingBody:
        turn: asyncio.Future[ArrivingBody] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(PATIENCE):
                return await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # at the last moment
                return turn.result()
            if not self._make_room(size):
                raise self._full(size) from None
            return self._add(size)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            raise
        finally:
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
            self._let_in()

    def _add(self, size: int) -> ArrivingBody:
        body = ArrivingBody(self, size, asyncio.get_running_loop().time())
        self._bodies[body] = None
        self.bytes += size
        return body

    def _release(self, body: ArrivingBody) -> None:
        """Idempotent. Those who wait come in, in order, as far as there is room now."""
        if body not in self._bodies:
            return
        del self._bodies[body]
        self.bytes -= body.size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            size, turn = self._waiting.popleft()
            if not turn.done():  # else its client is gone
                turn.set_result(self._add(size))

    def _full(self, size: int) -> Overloaded:
        return Overloaded(
            f"{len(self._bodies)} {self.what} with {self.bytes} bytes are arriving and one of {size} bytes more would"
            f" come: at most {self._most} and {self._most_bytes} bytes at once",
            retry_after=_RETRY,
        )


class ArrivingBodies:
    """Of both front doors."""

    def __init__(self) -> None:
        self._small = BodyRoom("small bodies", MAX_SMALL_BODIES, MAX_SMALL_BODIES * MAX_SMALL_BODY)
        self._large = BodyRoom("large bodies", MAX_SMALL_BODIES, MAX_LARGE_BODIES_BYTES)
        self.grpc = grpc_room()

    def of_size(self, size: int | None) -> BodyRoom:
        """For an HTTP body that says how long it will be, or None if it does not."""
        return self._small if size is not None and size <= MAX_SMALL_BODY else self._large


def grpc_room() -> BodyRoom:
    """For requests over gRPC, which do not say how long they will be."""
    return BodyRoom("gRPC requests", MAX_GRPC_BODIES, MAX_GRPC_BODIES * MAX_BODY_BYTES)
