"""Spaces out the decoding of large request bodies.

A decoder of JSON or protobuf holds Python's lock for about 10 ms per MiB, and nothing else in the
process runs meanwhile. Each class of sizes has a token bucket of bytes: one client's largest bodies
take a few percent of the time, and bodies of a moderate size do not queue behind them.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from baton.errors import Overloaded
from baton.limits import MAX_SMALL_BODY_BYTES
from baton.process.clock import Clock, monotonic_clock
from coordinator.core.admission.tenants import TokenBucket

MODERATE_BODY = 512 << 10  # bytes; larger bodies have a queue of their own
MODERATE_RATE = 16 << 20  # bytes per second
LARGE_RATE = 4 << 20  # bytes per second
MAX_WAIT = 10.0  # seconds that a body waits for its turn


class DecodingPacer:
    """Token buckets for moderate and for large bodies, on the coordinator's event loop."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self._moderate = _Queue(MODERATE_RATE, clock)
        self._large = _Queue(LARGE_RATE, clock)

    async def wait_turn(self, size: int) -> None:
        """Return when a body of `size` bytes may be decoded, at once if it is small.

        Raises Overloaded when it would wait for more than MAX_WAIT seconds.
        """
        if size > MAX_SMALL_BODY_BYTES:
            await (self._moderate if size <= MODERATE_BODY else self._large).wait_turn(size)


@dataclass(eq=False, slots=True)
class _Waiter:
    size: int
    turn: "asyncio.Future[None]"


class _Queue:
    """First come, first served, at `rate` bytes per second."""

    def __init__(self, rate: int, clock: Clock) -> None:
        self._rate = rate
        self._clock = clock
        self._bucket = TokenBucket.make_full(rate, 1.0, clock())
        self._waiters: deque[_Waiter] = deque()
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    async def wait_turn(self, size: int) -> None:
        now = self._clock()
        wait = self._bucket.wait_seconds(now)
        if not self._waiters and not wait:
            self._bucket.charge_tokens(size, now)
            return
        expected = wait + self._waiting_bytes / self._rate
        if expected > MAX_WAIT:
            raise Overloaded(
                f"{self._waiting_bytes} bytes of large bodies wait to be decoded, for "
                f"{expected:.0f} s: at most "
                f"{MAX_WAIT:g} s",
                retry_after=expected,
            )
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._waiting_bytes += size
        self._set_timer(wait)
        try:
            await waiter.turn
        finally:
            if waiter in self._waiters:  # its client has disconnected
                self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._waiting_bytes -= waiter.size

    def _set_timer(self, wait: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._give_turns)

    def _give_turns(self) -> None:
        self._timer = None
        now = self._clock()
        while self._waiters and not self._bucket.wait_seconds(now):
            waiter = self._waiters[0]
            self._remove(waiter)
            if not waiter.turn.done():
                self._bucket.charge_tokens(waiter.size, now)
                waiter.turn.set_result(None)
        if self._waiters:
            self._set_timer(self._bucket.wait_seconds(now))
