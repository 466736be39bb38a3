"""What the bodies of requests may hold while they arrive and are decoded: bounded in number, bytes and time.

Small bodies, large ones and those over gRPC have room of their own, so that none of them takes that of another kind.
A body is charged the bytes that have come of it. Who finds no room waits for a moment: bodies that have begun before
those that have not, then whoever has the fewest there. Meanwhile a body of which nothing has come lately, or that has
been arriving for longer than most ever do, gives up its room, so that nobody is kept out by half-sent bodies.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.limits import (
    MAX_BODY_BYTES,
    MAX_GRPC_BODIES,
    MAX_GRPC_BODIES_PER_PEER,
    MAX_LARGE_BODIES_BYTES,
    MAX_SMALL_BODIES,
    MAX_SMALL_BODY,
)
from coordinator.decoding_pacer import DecodingPacer

PATIENCE = 1.0  # seconds for which a body waits for room
STALLED_AFTER = 0.5  # seconds without a byte after which a body gives way to one that waits
DISPLACED_AFTER = 2.0  # seconds of arriving after which it does so whatever comes of it
_LOOK_EVERY = 0.05  # seconds between two looks for bodies that give way, while others wait
_DISPLACED_AT_ONCE = 64  # bodies that one look displaces
_RETRY = 1.0  # seconds


@dataclass(eq=False, slots=True)
class ArrivingBody:
    """One body of `owner`'s, and the bytes that it is charged. `timer` is that of whoever reads it, until it is
    complete; `received` is when something came of it last."""

    room: "BodyRoom"
    owner: str
    size: int
    since: float
    received: float
    timer: asyncio.Timeout | None = None
    displaced: bool = False
    is_waiting: bool = False

    def reading(self, timer: asyncio.Timeout) -> None:
        """From now on it is arriving, and can be displaced: then the timer ends it at once."""
        self.timer = timer

    def complete(self) -> None:
        self.timer = None

    async def wait_to_decode(self, size: int) -> None:
        """Return when the complete body, of `size` bytes, may be decoded. Raises Overloaded."""
        await self.room.pacer.wait_turn(size)

    async def grow(self, size: int) -> None:
        """It is `size` bytes now. Waits for room. Raises Overloaded."""
        await self.room.grow(self, size)

    def is_overdue(self, now: float) -> bool:
        """Whether it gives way to one that waits. One that waits itself cannot be blamed for receiving nothing."""
        if self.timer is None:
            return False
        stalled = not self.is_waiting and now - self.received >= STALLED_AFTER
        return stalled or now - self.since >= DISPLACED_AFTER

    def refusal(self) -> Overloaded:
        """What the client of a body that was displaced is told."""
        return Overloaded(f"{self.room.what} came while this one was still arriving: send it again", retry_after=_RETRY)


@dataclass(eq=False, slots=True)
class _Waiting:
    """For room of `size` bytes: for a new body of `owner`'s, or for so much more of `body`."""

    owner: str
    size: int
    turn: "asyncio.Future[ArrivingBody]"
    body: ArrivingBody | None = None


class BodyRoom:
    """Room for bodies of one kind, at most `per_owner` of them of one owner's. All on one event loop."""

    def __init__(
        self,
        what: str,
        most: int,
        most_bytes: int,
        per_owner: int | None = None,
        pacer: DecodingPacer | None = None,
    ) -> None:
        self.what = what
        self.pacer = pacer or DecodingPacer()
        self.bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._per_owner = most if per_owner is None else per_owner
        self._bodies: dict[ArrivingBody, None] = {}  # the oldest first
        self._held: Counter[str] = Counter()  # bodies by owner
        self._growing: deque[_Waiting] = deque()
        self._entering: dict[str, deque[_Waiting]] = {}  # by owner
        self._look: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._bodies)

    @asynccontextmanager
    async def take(self, size: int, owner: str = "") -> AsyncIterator[ArrivingBody]:
        """Room for `size` bytes, for as long as the block runs. Raises Overloaded if there is none for a second."""
        if self._next() is not None or not self._make_room(size, owner):
            body = await self._wait(_Waiting(owner, size, asyncio.get_running_loop().create_future()))
        else:
            body = self._add(size, owner)
        try:
            yield body
        finally:
            self._release(body)

    async def grow(self, body: ArrivingBody, size: int) -> None:
        """See `ArrivingBody.grow`."""
        loop, more = asyncio.get_running_loop(), size - body.size
        body.received = loop.time()
        if more <= 0 or body.displaced:
            return
        if not self._growing and self._make_room(more, growing=body):
            self._charge(body, more)
            return
        body.is_waiting = True
        try:
            await self._wait(_Waiting(body.owner, more, loop.create_future(), body))
        finally:
            body.is_waiting = False
            body.received = loop.time()

    def _fits(self, size: int, owner: str | None) -> bool:
        """`owner` is None for more of a body that is here."""
        if self.bytes + size > self._most_bytes:
            return False
        return owner is None or (len(self._bodies) < self._most and self._held[owner] < self._per_owner)

    def _make_room(self, size: int, owner: str | None = None, growing: ArrivingBody | None = None) -> bool:
        """Displace those that are overdue as far as that is what it takes."""
        if self._fits(size, owner):
            return True
        is_own = owner is not None and self._held[owner] >= self._per_owner
        for body in self._overdue():
            if body is growing or (is_own and body.owner != owner):
                continue
            self._displace(body)
            if self._fits(size, owner):
                return True
        return False

    def _overdue(self) -> list[ArrivingBody]:
        """The first to be displaced: of the owner with the most, what has received nothing for longest."""
        now = asyncio.get_running_loop().time()
        overdue = (body for body in self._bodies if body.is_overdue(now))
        return heapq.nsmallest(_DISPLACED_AT_ONCE, overdue, lambda body: (-self._held[body.owner], body.received))

    def _displace(self, body: ArrivingBody) -> None:
        assert body.timer is not None
        body.displaced = True
        body.timer.reschedule(asyncio.get_running_loop().time())
        self._drop(body)

    async def _wait(self, entry: _Waiting) -> ArrivingBody:
        line = self._growing if entry.body else self._entering.setdefault(entry.owner, deque())
        line.append(entry)
        self._look_later()
        turn = entry.turn
        try:
            async with asyncio.timeout(PATIENCE):
                return await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # at the last moment
                return turn.result()
            if not self._make_room(entry.size, None if entry.body else entry.owner, entry.body):
                raise self._full(entry) from None
            return self._admit(entry)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and entry.body is None:
                self._release(turn.result())
            raise
        finally:
            self._forget(entry)
            self._let_in()

    def _forget(self, entry: _Waiting) -> None:
        line = self._growing if entry.body else self._entering.get(entry.owner)
        if line and entry in line:
            line.remove(entry)
        if entry.body is None and not self._entering.get(entry.owner, True):
            del self._entering[entry.owner]

    def _admit(self, entry: _Waiting) -> ArrivingBody:
        if entry.body is None:
            return self._add(entry.size, entry.owner)
        self._charge(entry.body, entry.size)
        return entry.body

    def _add(self, size: int, owner: str) -> ArrivingBody:
        now = asyncio.get_running_loop().time()
        body = ArrivingBody(self, owner, size, since=now, received=now)
        self._bodies[body] = None
        self._held[owner] += 1
        self.bytes += size
        return body

    def _charge(self, body: ArrivingBody, more: int) -> None:
        if body in self._bodies:  # else it was displaced meanwhile
            body.size += more
            self.bytes += more

    def _release(self, body: ArrivingBody) -> None:
        """Idempotent. Those who wait come in, in order, as far as there is room now."""
        if self._drop(body):
            self._let_in()

    def _drop(self, body: ArrivingBody) -> bool:
        if body not in self._bodies:
            return False
        del self._bodies[body]
        self.bytes -= body.size
        self._held[body.owner] -= 1
        if not self._held[body.owner]:
            del self._held[body.owner]
        return True

    def _let_in(self) -> None:
        """Whoever is next, as far as there is room."""
        while (entry := self._next()) is not None:
            if not self._fits(entry.size, None if entry.body else entry.owner):
                return
            self._forget(entry)
            if not entry.turn.done():  # else its client is gone
                entry.turn.set_result(self._admit(entry))

    def _next(self) -> _Waiting | None:
        """Who has begun goes first; else the owner with the fewest, unless it has all that it may."""
        if self._growing:
            return self._growing[0]
        owners = [owner for owner in self._entering if self._held[owner] < self._per_owner]
        return self._entering[min(owners, key=lambda owner: self._held[owner])][0] if owners else None

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_EVERY, self._look_now)

    def _look_now(self) -> None:
        """Let those who wait in at the cost of bodies that are overdue, each owner's own where it has all it may."""
        self._look = None
        for body in self._overdue():
            self._let_in()
            blocked = self._next()
            is_own = body.owner in self._entering and self._held[body.owner] >= self._per_owner
            if is_own or (blocked is not None and blocked.body is not body):
                self._displace(body)
        self._let_in()
        if self._growing or self._entering:
            self._look_later()

    def _full(self, entry: _Waiting) -> Overloaded:
        return Overloaded(
            f"{len(self._bodies)} {self.what} with {self.bytes} bytes are arriving and {entry.size} bytes more would"
            f" come: at most {self._most} and {self._most_bytes} bytes at once, {self._per_owner} of one client's",
            retry_after=_RETRY,
        )


class ArrivingBodies:
    """Of both front doors. `most_connections` is what the HTTP port may hold: half-sent bodies are on fewer."""

    def __init__(self, most_connections: int = 2 * MAX_SMALL_BODIES) -> None:
        most_small = max(1, min(MAX_SMALL_BODIES, most_connections // 2))
        most_large = max(1, min(MAX_SMALL_BODIES, most_connections // 4))
        pacer = DecodingPacer()
        self._small = BodyRoom("small bodies", most_small, MAX_SMALL_BODIES * MAX_SMALL_BODY, pacer=pacer)
        self._large = BodyRoom("large bodies", most_large, MAX_LARGE_BODIES_BYTES, pacer=pacer)
        self.grpc = grpc_room(pacer)

    def of_size(self, size: int | None) -> BodyRoom:
        """For an HTTP body that says how long it will be, or None if it does not."""
        return self._small if size is not None and size <= MAX_SMALL_BODY else self._large


def grpc_room(pacer: DecodingPacer | None = None) -> BodyRoom:
    """For requests over gRPC, which do not say how long they will be. The library shows only whole ones."""
    most_bytes = MAX_GRPC_BODIES * MAX_BODY_BYTES
    return BodyRoom("gRPC requests", MAX_GRPC_BODIES, most_bytes, MAX_GRPC_BODIES_PER_PEER, pacer)
