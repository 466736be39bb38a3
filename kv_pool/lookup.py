"""One question of a node to its pool: answered in time, or a miss."""

import asyncio
from collections.abc import Callable

from baton.pb.pool_pb2 import PoolAnswer, PoolQuestion
from baton.pool_terms import PoolHit
from kv_pool.attachment import MISS
from kv_pool.line import Line
from kv_pool.terms import LOAD_PATIENCE

_Answer = asyncio.Future[PoolAnswer]


class Lookup:
    """`then` is called once, on the loop. If more is on its way to the pool's memory, that is waited for as long as it
    pays; after that, what was found at first counts. What comes later is released at once. `count` counts by metric;
    `patience`: seconds for the first answer."""

    def __init__(
        self,
        line: Line,
        question: PoolQuestion,
        then: Callable[[PoolHit], None],
        count: Callable[[str], None],
        patience: float,
    ) -> None:
        self._line = line
        self._then = then
        self._count = count
        self._open = True
        self._first = MISS  # what is there, while more is waited for
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(patience, self._expire, "baton_pool_lookups_late_total")
        more: _Answer = self._loop.create_future()
        more.add_done_callback(self._came)
        line.session.ask(question, more).add_done_callback(self._answered)

    def _answered(self, answer: _Answer) -> None:
        hit = self._hit(answer)
        found = answer.result().found if answer.exception() is None else None
        if found is None or not found.loading or not self._open:
            self._conclude(hit)
            return
        self._first = hit
        self._timer.cancel()
        patience = min(found.patience, LOAD_PATIENCE)
        self._timer = self._loop.call_later(patience, self._expire, "baton_pool_loads_late_total")

    def _came(self, answer: _Answer) -> None:
        """The second answer."""
        hit = self._hit(answer)
        if self._open and hit.pin is None:
            self._conclude(self._first)
            return
        if self._open:
            self._let_go(self._first)
        self._conclude(hit)

    def _expire(self, metric: str) -> None:
        if self._open:
            self._count(metric)
            self._conclude(self._first)

    def _conclude(self, hit: PoolHit) -> None:
        if not self._open:
            self._let_go(hit)
            return
        self._open = False
        self._timer.cancel()
        self._then(hit)

    def _hit(self, answer: _Answer) -> PoolHit:
        return self._line.attachment.hit(answer.result().found) if answer.exception() is None else MISS

    def _let_go(self, hit: PoolHit) -> None:
        if hit.pin is not None:
            self._line.release(hit.pin)
