"""Spaces out the decoding of large request bodies, fairly by client.

A decoder of JSON or protobuf holds Python's lock for about 10 ms per MiB, and nothing else in the
process runs meanwhile. Each class of sizes has a token bucket of bytes: one client's largest bodies
take a few percent of the time, and bodies of a moderate size do not queue behind them. Within a
class clients take turns, one body each (round robin, as RFC 970 has it for packets), and when too
much waits, the client that has most waiting loses its newest body (longest queue drop).
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.process.clock import Clock, monotonic_clock
from coordinator.core.admission.tenants import TokenBucket

MODERATE_BODY = 512 << 10  # bytes; larger bodies have a queue of their own
MODERATE_RATE = 16 << 20  # bytes per second
LARGE_RATE = 4 << 20  # bytes per second
MAX_WAIT = 10.0  # seconds that a body waits for its turn


class DecodingPacer:
    """Queues of moderate and of large bodies, on the coordinator's event loop."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self._moderate = _Queue(MODERATE_RATE, clock)
        self._large = _Queue(LARGE_RATE, clock)

    async def wait_turn(self, size: int, client: str) -> None:
        """Return when a body of `size` bytes of this client may be decoded.

        Raises Overloaded when it would wait, or has waited, for more than MAX_WAIT seconds.
        """
        await (self._moderate if size <= MODERATE_BODY else self._large).wait_turn(size, client)


@dataclass(eq=False, slots=True)
class _Waiter:
    client: str
    size: int
    turn: "asyncio.Future[None]"
    refusal: Overloaded | None = None  # set if it lost its place in line


class _Queue:
    """Clients take turns, at `rate` bytes per second."""

    def __init__(self, rate: int, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._bucket = TokenBucket.make_full(rate, 1.0, clock())
        self._waiters: dict[str, deque[_Waiter]] = {}  # by client; whose turn is next is first
        self._waiting_bytes: Counter[str] = Counter()  # by client
        self._timer: asyncio.TimerHandle | None = None

    async def wait_turn(self, size: int, client: str) -> None:
        now = self._clock()
        wait = self._bucket.wait_seconds(now)
        if not self._waiters and not wait:
            self._bucket.charge_tokens(size, now)
            return
        self._make_room(size, client, wait)
        waiter = _Waiter(client, size, asyncio.get_running_loop().create_future())
        self._waiters.setdefault(client, deque()).append(waiter)
        self._waiting_bytes[client] += size
        self._set_timer(wait)
        try:
            async with asyncio.timeout(MAX_WAIT):
                await waiter.turn
            if waiter.refusal is not None:
                raise waiter.refusal
        except TimeoutError:
            raise self._overloaded(MAX_WAIT) from None
        finally:
            if waiter in self._waiters.get(client, ()):  # not served, or its client is gone
                self._remove_waiter(waiter)

    def _make_room(self, size: int, client: str, wait: float) -> None:
        """Refuse bodies of the client with the most bytes waiting until the wait is within bounds.

        Raises Overloaded if that is the client of the new body.
        """
        while (expected := wait + self._waiting_bytes.total() / self._rate) > MAX_WAIT:
            greatest = max(self._waiters, key=self._waiting_bytes.__getitem__, default=client)
            if self._waiting_bytes[client] + size >= self._waiting_bytes[greatest]:
                raise self._overloaded(expected)
            newest = self._waiters[greatest][-1]
            self._remove_waiter(newest)
            newest.refusal = self._overloaded(expected)
            if not newest.turn.done():
                newest.turn.set_result(None)

    def _overloaded(self, expected: float) -> Overloaded:
        return Overloaded(
            f"{self._waiting_bytes.total()} bytes of large bodies wait to be decoded, for "
            f"{expected:.0f} s: at most {MAX_WAIT:g} s",
            retry_after=expected,
        )

    def _remove_waiter(self, waiter: _Waiter) -> None:
        queue = self._waiters[waiter.client]
        queue.remove(waiter)
        self._waiting_bytes[waiter.client] -= waiter.size
        if not queue:
            del self._waiters[waiter.client], self._waiting_bytes[waiter.client]

    def _set_timer(self, wait: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._give_turns)

    def _give_turns(self) -> None:
        self._timer = None
        now = self._clock()
        while self._waiters and not self._bucket.wait_seconds(now):
            waiter = self._next_waiter()
            if not waiter.turn.done():
                self._bucket.charge_tokens(waiter.size, now)
                waiter.turn.set_result(None)
        if self._waiters:
            self._set_timer(self._bucket.wait_seconds(now))

    def _next_waiter(self) -> _Waiter:
        """Remove the oldest body of the client whose turn it is, which is last in line then."""
        client, queue = next(iter(self._waiters.items()))
        waiter = queue[0]
        self._remove_waiter(waiter)
        if queue:
            self._waiters[client] = self._waiters.pop(client)
        return waiter
