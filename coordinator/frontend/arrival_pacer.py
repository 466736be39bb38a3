"""Bounds the rate at which large request bodies are read, in favour of those that are short.

Reading takes the event loop about 1 ms per MiB and several iterations, in which every other request
waits. The transport of a body that waits stops reading, so TCP slows its sender down. Of the bodies
that wait, the one with the fewest bytes so far is read first (least attained service first, see
Nuyens and Wierman, "The Foreground-Background queue: a survey", 2008): a prompt of 100 kB does not
queue behind a flood of bodies of many megabytes.
"""

import asyncio
import heapq
import itertools

ARRIVAL_RATE = 64 << 20  # bytes per second of all large bodies
_READ_INTERVAL_SECONDS = 0.001  # between two reads that are permitted and not yet charged


class ArrivalPacer:
    """A token bucket without burst, on one event loop."""

    def __init__(self) -> None:
        self._next_read_at = 0.0  # seconds on the event loop's clock
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()  # first come, first served among equals
        self._timer: asyncio.TimerHandle | None = None

    async def wait_turn(self, received_bytes: int, new_bytes: int) -> None:
        """Return when more may be read of a body of which `received_bytes` have arrived.

        The latest `new_bytes` of them are charged first.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._next_read_at = max(self._next_read_at, now) + new_bytes / ARRIVAL_RATE
        turn = loop.create_future()
        heapq.heappush(self._waiters, (received_bytes, next(self._numbers), turn))
        self._set_timer()
        await turn

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._next_read_at, self._give_turn)

    def _give_turn(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < self._next_read_at:
            self._set_timer()
            return
        while self._waiters:
            turn = heapq.heappop(self._waiters)[2]
            if not turn.done():  # else its body was given up
                turn.set_result(None)
                break
        if self._waiters:
            self._timer = loop.call_later(_READ_INTERVAL_SECONDS, self._give_turn)
