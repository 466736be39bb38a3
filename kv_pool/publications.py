"""Nodes' publications that are under way, and who waits for them: a prompt that another node has just computed is not
computed again while it is being copied.

Nobody waits for longer than computing the blocks would take, nor than PATIENCE; a publication waits for nobody.
"""

import asyncio
from dataclasses import dataclass

from baton.clock import Clock
from kv_pool.arrivals import Arrival
from kv_pool.core.chain import Chain
from kv_pool.core.holders import Granted, Holder, PublicationId
from kv_pool.terms import LATE

PATIENCE = LATE  # seconds
_TIER = "memory"


@dataclass(frozen=True, slots=True)
class _UnderWay:
    publisher: Holder
    name: bytes  # of its first block
    arrival: Arrival
    timer: asyncio.TimerHandle


class Publications:
    """On the pool's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[tuple[Holder, PublicationId], _UnderWay] = {}
        self._by_name: dict[bytes, _UnderWay] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, publisher: Holder, chain: Chain, granted: Granted) -> None:
        """Places have been granted, or none. Of two publications of one block the first is waited for."""
        if granted.publication is None:
            return
        name = chain.name(granted.first)
        arrival = Arrival(_TIER, len(granted.blocks), PATIENCE, self._clock())
        timer = asyncio.get_running_loop().call_later(PATIENCE, arrival.over.set)
        found = _UnderWay(publisher, name, arrival, timer)
        self._under_way[publisher, granted.publication] = found
        self._by_name.setdefault(name, found)

    def expected(
        self, reader: Holder, chain: Chain, first: int, end: int, token_seconds: float | None
    ) -> Arrival | None:
        """What brings block `first` of `chain`, if `reader` had better wait for it than compute. Its own publications
        are of blocks that it has."""
        found = self._by_name.get(chain.name(first)) if first < end else None
        if found is None or found.publisher == reader or found.arrival.over.is_set():
            return None
        blocks = min(found.arrival.blocks, end - first)
        patience = PATIENCE if token_seconds is None else min(PATIENCE, token_seconds * blocks * chain.block_size)
        left = found.arrival.since + patience - self._clock()
        if left <= 0:
            return None
        return Arrival(_TIER, blocks, left, found.arrival.since, found.arrival.over)

    def ended(self, publisher: Holder, publication: PublicationId) -> None:
        """Sealed or withdrawn. Idempotent."""
        found = self._under_way.pop((publisher, publication), None)
        if found is not None:
            found.timer.cancel()
            found.arrival.over.set()
            if self._by_name.get(found.name) is found:
                del self._by_name[found.name]

    def all_ended(self, publisher: Holder) -> None:
        """Its stream has ended: nobody waits for what it was writing."""
        for one in [key for key in self._under_way if key[0] == publisher]:
            self.ended(*one)
