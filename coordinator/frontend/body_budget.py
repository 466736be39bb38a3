"""What the bodies of requests may hold while they arrive and are decoded: bounded in number, bytes
and time.

Small bodies, large ones and those over gRPC have room of their own, so that none of them takes that
of another kind. A body is charged the bytes that have come of it. Who finds no room waits for a
moment: bodies that have begun before those that have not, then whoever has the fewest there.
Meanwhile a body of which nothing has come lately, or that has been arriving for longer than most
ever do, gives up its room, so that nobody is kept out by half-sent bodies.
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
    MAX_CONCURRENT_GRPC_BODIES,
    MAX_CONCURRENT_LARGE_BODY_BYTES,
    MAX_CONCURRENT_SMALL_BODIES,
    MAX_GRPC_BODIES_PER_CONNECTION,
    MAX_SMALL_BODY_BYTES,
)
from coordinator.frontend.decoding_pacer import DecodingPacer

MAX_WAIT_SECONDS = 1.0  # seconds for which a body waits for room
STALL_SECONDS = 0.5  # seconds without a byte after which a body gives way to one that waits
DISPLACE_SECONDS = 2.0  # seconds of arriving after which it does so whatever comes of it
_SWEEP_INTERVAL_SECONDS = (
    0.05  # seconds between two looks for bodies that give way, while others wait
)
_MAX_DISPLACED_PER_SWEEP = 64  # bodies that one look displaces
_RETRY_SECONDS = 1.0  # seconds


@dataclass(eq=False, slots=True)
class IncomingBody:
    """One body of `client`'s, and the bytes that it is charged. `timer` is that of whoever reads
    it, until it is complete; `last_received_at` is when something came of it last."""

    budget: "BodyBudget"
    client: str
    charged_bytes: int
    started_at: float
    last_received_at: float
    timer: asyncio.Timeout | None = None
    is_displaced: bool = False
    is_waiting: bool = False

    def start_reading(self, timer: asyncio.Timeout) -> None:
        """From now on it is arriving, and can be displaced: then the timer ends it at once."""
        self.timer = timer

    def mark_complete(self) -> None:
        self.timer = None

    async def wait_to_decode(self, size: int) -> None:
        """Return when the complete body, of `size` bytes, may be decoded. Raises Overloaded."""
        await self.budget.pacer.wait_turn(size)

    async def grow_to(self, size: int) -> None:
        """It is `size` bytes now. Waits for room. Raises Overloaded."""
        await self.budget.grow_body(self, size)

    def is_overdue(self, now: float) -> bool:
        """Whether it gives way to one that waits. One that waits itself cannot be blamed for
        receiving nothing."""
        if self.timer is None:
            return False
        stalled = not self.is_waiting and now - self.last_received_at >= STALL_SECONDS
        return stalled or now - self.started_at >= DISPLACE_SECONDS

    def displaced_error(self) -> Overloaded:
        """What the client of a body that was displaced is told."""
        return Overloaded(
            f"{self.budget.description} came while this one was still arriving: send it again",
            retry_after=_RETRY_SECONDS,
        )


@dataclass(eq=False, slots=True)
class _BodyWaiter:
    """For room of `wanted_bytes` bytes: for a new body of `client`'s, or for so much more of
    `body`."""

    client: str
    wanted_bytes: int
    granted: "asyncio.Future[IncomingBody]"
    body: IncomingBody | None = None


class BodyBudget:
    """Room for bodies of one kind, at most `per_owner` of them of one owner's. All on one event
    loop."""

    def __init__(
        self,
        what: str,
        most: int,
        most_bytes: int,
        per_owner: int | None = None,
        pacer: DecodingPacer | None = None,
    ) -> None:
        self.description = what
        self.pacer = pacer or DecodingPacer()
        self.used_bytes = 0
        self._max_bodies = most
        self._max_bytes = most_bytes
        self._max_bodies_per_client = most if per_owner is None else per_owner
        self._bodies: dict[IncomingBody, None] = {}  # the oldest first
        self._bodies_per_client: Counter[str] = Counter()  # bodies by owner
        self._waiting_to_grow: deque[_BodyWaiter] = deque()
        self._waiting_to_enter: dict[str, deque[_BodyWaiter]] = {}  # by owner
        self._sweep_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._bodies)

    @asynccontextmanager
    async def reserve_body(self, size: int, owner: str = "") -> AsyncIterator[IncomingBody]:
        """Room for `size` bytes, for as long as the block runs. Raises Overloaded if there is none
        for a second."""
        if self._next_waiter() is not None or not self._make_room(size, owner):
            body = await self._wait_for_room(
                _BodyWaiter(owner, size, asyncio.get_running_loop().create_future())
            )
        else:
            body = self._add_body(size, owner)
        try:
            yield body
        finally:
            self._release_body(body)

    async def grow_body(self, body: IncomingBody, size: int) -> None:
        """See `IncomingBody.grow_to`."""
        loop, more = asyncio.get_running_loop(), size - body.charged_bytes
        body.last_received_at = loop.time()
        if more <= 0 or body.is_displaced:
            return
        if not self._waiting_to_grow and self._make_room(more, growing=body):
            self._charge_body(body, more)
            return
        body.is_waiting = True
        try:
            await self._wait_for_room(_BodyWaiter(body.client, more, loop.create_future(), body))
        finally:
            body.is_waiting = False
            body.last_received_at = loop.time()

    def _fits(self, size: int, owner: str | None) -> bool:
        """`owner` is None for more of a body that is here."""
        if self.used_bytes + size > self._max_bytes:
            return False
        return owner is None or (
            len(self._bodies) < self._max_bodies
            and self._bodies_per_client[owner] < self._max_bodies_per_client
        )

    def _make_room(
        self, size: int, owner: str | None = None, growing: IncomingBody | None = None
    ) -> bool:
        """Displace those that are overdue as far as that is what it takes."""
        if self._fits(size, owner):
            return True
        is_own = owner is not None and self._bodies_per_client[owner] >= self._max_bodies_per_client
        for body in self._overdue_bodies():
            if body is growing or (is_own and body.client != owner):
                continue
            self._displace(body)
            if self._fits(size, owner):
                return True
        return False

    def _overdue_bodies(self) -> list[IncomingBody]:
        """The first to be displaced: of the owner with the most, what has received nothing for
        longest."""
        now = asyncio.get_running_loop().time()
        overdue = (body for body in self._bodies if body.is_overdue(now))
        return heapq.nsmallest(
            _MAX_DISPLACED_PER_SWEEP,
            overdue,
            lambda body: (-self._bodies_per_client[body.client], body.last_received_at),
        )

    def _displace(self, body: IncomingBody) -> None:
        assert body.timer is not None
        body.is_displaced = True
        body.timer.reschedule(asyncio.get_running_loop().time())
        self._remove_body(body)

    async def _wait_for_room(self, entry: _BodyWaiter) -> IncomingBody:
        line = (
            self._waiting_to_grow
            if entry.body
            else self._waiting_to_enter.setdefault(entry.client, deque())
        )
        line.append(entry)
        self._schedule_sweep()
        turn = entry.granted
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # at the last moment
                return turn.result()
            if not self._make_room(
                entry.wanted_bytes, None if entry.body else entry.client, entry.body
            ):
                raise self._budget_exceeded(entry) from None
            return self._admit_waiter(entry)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and entry.body is None:
                self._release_body(turn.result())
            raise
        finally:
            self._remove_waiter(entry)
            self._admit_waiters()

    def _remove_waiter(self, entry: _BodyWaiter) -> None:
        line = self._waiting_to_grow if entry.body else self._waiting_to_enter.get(entry.client)
        if line and entry in line:
            line.remove(entry)
        if entry.body is None and not self._waiting_to_enter.get(entry.client, True):
            del self._waiting_to_enter[entry.client]

    def _admit_waiter(self, entry: _BodyWaiter) -> IncomingBody:
        if entry.body is None:
            return self._add_body(entry.wanted_bytes, entry.client)
        self._charge_body(entry.body, entry.wanted_bytes)
        return entry.body

    def _add_body(self, size: int, owner: str) -> IncomingBody:
        now = asyncio.get_running_loop().time()
        body = IncomingBody(self, owner, size, started_at=now, last_received_at=now)
        self._bodies[body] = None
        self._bodies_per_client[owner] += 1
        self.used_bytes += size
        return body

    def _charge_body(self, body: IncomingBody, more: int) -> None:
        if body in self._bodies:  # else it was displaced meanwhile
            body.charged_bytes += more
            self.used_bytes += more

    def _release_body(self, body: IncomingBody) -> None:
        """Idempotent. Those who wait come in, in order, as far as there is room now."""
        if self._remove_body(body):
            self._admit_waiters()

    def _remove_body(self, body: IncomingBody) -> bool:
        if body not in self._bodies:
            return False
        del self._bodies[body]
        self.used_bytes -= body.charged_bytes
        self._bodies_per_client[body.client] -= 1
        if not self._bodies_per_client[body.client]:
            del self._bodies_per_client[body.client]
        return True

    def _admit_waiters(self) -> None:
        """Whoever is next, as far as there is room."""
        while (entry := self._next_waiter()) is not None:
            if not self._fits(entry.wanted_bytes, None if entry.body else entry.client):
                return
            self._remove_waiter(entry)
            if not entry.granted.done():  # else its client is gone
                entry.granted.set_result(self._admit_waiter(entry))

    def _next_waiter(self) -> _BodyWaiter | None:
        """Who has begun goes first; else the owner with the fewest, unless it has all that it
        may."""
        if self._waiting_to_grow:
            return self._waiting_to_grow[0]
        owners = [
            owner
            for owner in self._waiting_to_enter
            if self._bodies_per_client[owner] < self._max_bodies_per_client
        ]
        return (
            self._waiting_to_enter[min(owners, key=lambda owner: self._bodies_per_client[owner])][0]
            if owners
            else None
        )

    def _schedule_sweep(self) -> None:
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(
                _SWEEP_INTERVAL_SECONDS, self._sweep_overdue
            )

    def _sweep_overdue(self) -> None:
        """Let those who wait in at the cost of bodies that are overdue, each owner's own where it
        has all it may."""
        self._sweep_timer = None
        for body in self._overdue_bodies():
            self._admit_waiters()
            blocked = self._next_waiter()
            is_own = (
                body.client in self._waiting_to_enter
                and self._bodies_per_client[body.client] >= self._max_bodies_per_client
            )
            if is_own or (blocked is not None and blocked.body is not body):
                self._displace(body)
        self._admit_waiters()
        if self._waiting_to_grow or self._waiting_to_enter:
            self._schedule_sweep()

    def _budget_exceeded(self, entry: _BodyWaiter) -> Overloaded:
        return Overloaded(
            f"{len(self._bodies)} {self.description} with {self.used_bytes} bytes are arriving "
            f"and {entry.wanted_bytes} bytes more would"
            f" come: at most {self._max_bodies} and {self._max_bytes} bytes at once, "
            f"{self._max_bodies_per_client} of one client's",
            retry_after=_RETRY_SECONDS,
        )


class BodyBudgets:
    """Of both front doors. `most_connections` is what the HTTP port may hold: half-sent bodies are
    on fewer."""

    def __init__(self, most_connections: int = 2 * MAX_CONCURRENT_SMALL_BODIES) -> None:
        most_small = max(1, min(MAX_CONCURRENT_SMALL_BODIES, most_connections // 2))
        most_large = max(1, min(MAX_CONCURRENT_SMALL_BODIES, most_connections // 4))
        pacer = DecodingPacer()
        self._small = BodyBudget(
            "small bodies",
            most_small,
            MAX_CONCURRENT_SMALL_BODIES * MAX_SMALL_BODY_BYTES,
            pacer=pacer,
        )
        self._large = BodyBudget(
            "large bodies", most_large, MAX_CONCURRENT_LARGE_BODY_BYTES, pacer=pacer
        )
        self.grpc_budget = create_grpc_budget(pacer)

    def get_budget(self, size: int | None) -> BodyBudget:
        """For an HTTP body that says how long it will be, or None if it does not."""
        return self._small if size is not None and size <= MAX_SMALL_BODY_BYTES else self._large


def create_grpc_budget(pacer: DecodingPacer | None = None) -> BodyBudget:
    """For requests over gRPC, which do not say how long they will be. The library shows only whole
    ones."""
    most_bytes = MAX_CONCURRENT_GRPC_BODIES * MAX_BODY_BYTES
    return BodyBudget(
        "gRPC requests",
        MAX_CONCURRENT_GRPC_BODIES,
        most_bytes,
        MAX_GRPC_BODIES_PER_CONNECTION,
        pacer,
    )
