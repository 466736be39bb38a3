"""Bounds the number, bytes and time of request bodies while they arrive and are decoded.

Small bodies, large bodies and gRPC messages have separate budgets, so that one kind cannot use up
the room of another. A body is charged the bytes of it that have arrived. A body that finds no room
waits for up to MAX_WAIT_SECONDS: bodies that have begun to arrive precede new ones, and among new
ones the client with the fewest bodies goes first. Meanwhile, a body that has stalled, or that has
been arriving for unusually long, loses its room, so that half-sent bodies cannot block others.
"""

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from coordinator.frontend.arrival_pacer import ArrivalPacer
from coordinator.frontend.decoding_pacer import DecodingPacer

MAX_WAIT_SECONDS = 1.0  # how long a body waits for room
STALL_SECONDS = 0.5  # without MIN_PROGRESS_BYTES for so long, a body gives way to one that waits
MIN_PROGRESS_BYTES = 4 << 10
DISPLACE_SECONDS = 2.0  # a body that arrives for so long gives way, stalled or not
_SWEEP_INTERVAL_SECONDS = 0.05  # between two searches for overdue bodies, while others wait
_MAX_DISPLACED_PER_SWEEP = 64  # bodies
_RETRY_SECONDS = 1.0  # after which a refused client may try again


@dataclass(eq=False, slots=True)
class IncomingBody:
    """One body that is arriving or being decoded, and the bytes that it is charged."""

    budget: "BodyBudget"
    client: str  # address of the client, or name of the gRPC peer
    charged_bytes: int
    started_at: float  # seconds on the event loop's clock
    progressed_at: float  # when the last MIN_PROGRESS_BYTES were complete
    progress_bytes: int = 0  # received by then
    timer: asyncio.Timeout | None = None  # the reader's timer, until the body is complete
    is_displaced: bool = False
    is_waiting: bool = False

    def start_reading(self, timer: asyncio.Timeout) -> None:
        """From now on the body may be displaced, which makes `timer` expire at once."""
        self.timer = timer

    def mark_complete(self) -> None:
        self.timer = None

    async def wait_to_decode(self, size: int) -> None:
        """Return when the complete body, of `size` bytes, may be decoded: at once if it is small.

        Raises Overloaded.
        """
        if size > MAX_SMALL_BODY_BYTES:
            await self.budget.pacer.wait_turn(size, self.client)

    async def grow_to(self, size: int) -> None:
        """Wait for room for the `size` bytes that have arrived, and until the next may be read.

        Raises Overloaded.
        """
        more = size - self.charged_bytes
        await self.budget.grow_body(self, size)
        if size > MAX_SMALL_BODY_BYTES and more > 0:
            await self.budget.pace_arrival(self, more)

    @contextmanager
    def pause_stall_clock(self) -> Iterator[None]:
        """While the block runs, the body is not read; that time counts neither as a stall nor as
        progress."""
        loop = asyncio.get_running_loop()
        began, self.is_waiting = loop.time(), True
        try:
            yield
        finally:
            self.is_waiting = False
            self.progressed_at += loop.time() - began

    def is_overdue(self, now: float) -> bool:
        """Whether the body gives way to one that waits.

        A body that itself waits for room is not read, so it counts as stalled only afterwards.
        """
        if self.timer is None:
            return False
        stalled = not self.is_waiting and now - self.progressed_at >= STALL_SECONDS
        return stalled or now - self.started_at >= DISPLACE_SECONDS

    def displaced_error(self) -> Overloaded:
        """The error for the client of a displaced body."""
        return Overloaded(
            f"{self.budget.description} came while this one was still arriving: send it again",
            retry_after=_RETRY_SECONDS,
        )


@dataclass(eq=False, slots=True)
class _BodyWaiter:
    """Waits for room for a new body, or for more bytes of one that is arriving."""

    client: str
    wanted_bytes: int
    granted: "asyncio.Future[IncomingBody]"
    body: IncomingBody | None = None  # the body that grows; None for a new one


class BodyBudget:
    """Room for the bodies of one kind. Runs on one event loop."""

    def __init__(
        self,
        description: str,
        max_bodies: int,
        max_bytes: int,
        max_bodies_per_client: int | None = None,
        pacer: DecodingPacer | None = None,
    ) -> None:
        """`description` names the kind in error messages."""
        self.description = description
        self.pacer = pacer or DecodingPacer()
        self._arrival_pacer = ArrivalPacer()
        self.used_bytes = 0
        self._max_bodies = max_bodies
        self._max_bytes = max_bytes
        self._max_bodies_per_client = (
            max_bodies if max_bodies_per_client is None else max_bodies_per_client
        )
        self._bodies: dict[IncomingBody, None] = {}  # oldest first
        self._bodies_per_client: Counter[str] = Counter()
        self._waiting_to_grow: deque[_BodyWaiter] = deque()
        self._waiting_to_enter: dict[str, deque[_BodyWaiter]] = {}  # by client
        self._sweep_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._bodies)

    @asynccontextmanager
    async def reserve_body(self, size: int, client: str = "") -> AsyncIterator[IncomingBody]:
        """Hold room for `size` bytes while the block runs.

        Raises Overloaded if there is none within MAX_WAIT_SECONDS.
        """
        if self._next_waiter() is not None or not self._make_room(size, client):
            body = await self._wait_for_room(
                _BodyWaiter(client, size, asyncio.get_running_loop().create_future())
            )
        else:
            body = self._add_body(size, client)
        try:
            yield body
        finally:
            self._release_body(body)

    async def grow_body(self, body: IncomingBody, size: int) -> None:
        """See `IncomingBody.grow_to`."""
        loop, more = asyncio.get_running_loop(), size - body.charged_bytes
        if size - body.progress_bytes >= MIN_PROGRESS_BYTES:
            body.progressed_at, body.progress_bytes = loop.time(), size
        if more <= 0 or body.is_displaced:
            return
        if not self._waiting_to_grow and self._make_room(more, growing=body):
            self._charge_body(body, more)
            return
        with body.pause_stall_clock():
            await self._wait_for_room(_BodyWaiter(body.client, more, loop.create_future(), body))

    async def pace_arrival(self, body: IncomingBody, new_bytes: int) -> None:
        """Return when more of a large body may be read, after `new_bytes`."""
        with body.pause_stall_clock():
            await self._arrival_pacer.wait_turn(body.charged_bytes, new_bytes)

    def _fits(self, size: int, client: str | None) -> bool:
        """`client` is None for more bytes of a body that has room already."""
        if self.used_bytes + size > self._max_bytes:
            return False
        return client is None or (
            len(self._bodies) < self._max_bodies
            and self._bodies_per_client[client] < self._max_bodies_per_client
        )

    def _make_room(
        self, size: int, client: str | None = None, growing: IncomingBody | None = None
    ) -> bool:
        """Displace overdue bodies until `size` bytes fit. False if they do not fit then either."""
        if self._fits(size, client):
            return True
        is_own = (
            client is not None and self._bodies_per_client[client] >= self._max_bodies_per_client
        )
        for body in self._overdue_bodies():
            if body is growing or (is_own and body.client != client):
                continue
            self._displace(body)
            if self._fits(size, client):
                return True
        return False

    def _overdue_bodies(self) -> list[IncomingBody]:
        """Overdue bodies: those of the client with the most bodies first, longest stalled first."""
        now = asyncio.get_running_loop().time()
        overdue = (body for body in self._bodies if body.is_overdue(now))
        return heapq.nsmallest(
            _MAX_DISPLACED_PER_SWEEP,
            overdue,
            lambda body: (-self._bodies_per_client[body.client], body.progressed_at),
        )

    def _displace(self, body: IncomingBody) -> None:
        assert body.timer is not None
        body.is_displaced = True
        body.timer.reschedule(asyncio.get_running_loop().time())
        self._remove_body(body)

    async def _wait_for_room(self, entry: _BodyWaiter) -> IncomingBody:
        queue = (
            self._waiting_to_grow
            if entry.body
            else self._waiting_to_enter.setdefault(entry.client, deque())
        )
        queue.append(entry)
        self._schedule_sweep()
        turn = entry.granted
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await turn
        except TimeoutError:
            if turn.done() and not turn.cancelled():  # granted at the last moment
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
        queue = self._waiting_to_grow if entry.body else self._waiting_to_enter.get(entry.client)
        if queue and entry in queue:
            queue.remove(entry)
        if entry.body is None and not self._waiting_to_enter.get(entry.client, True):
            del self._waiting_to_enter[entry.client]

    def _admit_waiter(self, entry: _BodyWaiter) -> IncomingBody:
        if entry.body is None:
            return self._add_body(entry.wanted_bytes, entry.client)
        self._charge_body(entry.body, entry.wanted_bytes)
        return entry.body

    def _add_body(self, size: int, client: str) -> IncomingBody:
        now = asyncio.get_running_loop().time()
        body = IncomingBody(self, client, size, started_at=now, progressed_at=now)
        self._bodies[body] = None
        self._bodies_per_client[client] += 1
        self.used_bytes += size
        return body

    def _charge_body(self, body: IncomingBody, more: int) -> None:
        if body in self._bodies:  # else it has been displaced meanwhile
            body.charged_bytes += more
            self.used_bytes += more

    def _release_body(self, body: IncomingBody) -> None:
        """Free the room of a body and admit waiters into it. Idempotent."""
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
        """Admit waiters in order while the next one fits."""
        while (entry := self._next_waiter()) is not None:
            if not self._fits(entry.wanted_bytes, None if entry.body else entry.client):
                return
            self._remove_waiter(entry)
            if not entry.granted.done():  # else its client has disconnected
                entry.granted.set_result(self._admit_waiter(entry))

    def _next_waiter(self) -> _BodyWaiter | None:
        """The next waiter: a growing body, else one of the client with the fewest bodies.

        Clients that have all the bodies that they may have are skipped.
        """
        if self._waiting_to_grow:
            return self._waiting_to_grow[0]
        clients = [
            client
            for client in self._waiting_to_enter
            if self._bodies_per_client[client] < self._max_bodies_per_client
        ]
        return (
            self._waiting_to_enter[
                min(clients, key=lambda client: self._bodies_per_client[client])
            ][0]
            if clients
            else None
        )

    def _schedule_sweep(self) -> None:
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(
                _SWEEP_INTERVAL_SECONDS, self._sweep_overdue
            )

    def _sweep_overdue(self) -> None:
        """Admit waiters by displacing overdue bodies.

        A client that has all the bodies that it may have displaces its own only.
        """
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
    """The body budgets of the HTTP and gRPC front ends."""

    def __init__(self, max_connections: int = 2 * MAX_CONCURRENT_SMALL_BODIES) -> None:
        """`max_connections` is the limit of the HTTP port; half-sent bodies may use only a part."""
        max_small = max(1, min(MAX_CONCURRENT_SMALL_BODIES, max_connections // 2))
        max_large = max(1, min(MAX_CONCURRENT_SMALL_BODIES, max_connections // 4))
        pacer = DecodingPacer()
        self._small = BodyBudget(
            "small bodies",
            max_small,
            MAX_CONCURRENT_SMALL_BODIES * MAX_SMALL_BODY_BYTES,
            pacer=pacer,
        )
        self._large = BodyBudget(
            "large bodies", max_large, MAX_CONCURRENT_LARGE_BODY_BYTES, pacer=pacer
        )
        self.grpc_budget = create_grpc_budget(pacer)

    def get_budget(self, size: int | None) -> BodyBudget:
        """The budget for an HTTP body of a declared `size`, None if it declares none."""
        return self._small if size is not None and size <= MAX_SMALL_BODY_BYTES else self._large


def create_grpc_budget(pacer: DecodingPacer | None = None) -> BodyBudget:
    """The budget for gRPC requests, whose size is unknown until the library has read all of it."""
    max_bytes = MAX_CONCURRENT_GRPC_BODIES * MAX_BODY_BYTES
    return BodyBudget(
        "gRPC requests",
        MAX_CONCURRENT_GRPC_BODIES,
        max_bytes,
        MAX_GRPC_BODIES_PER_CONNECTION,
        pacer,
    )
