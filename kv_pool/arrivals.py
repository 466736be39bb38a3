"""What is on its way into the pool's memory, from disk or from another pool, and who waits for it.

An arrival is a publication: places are reserved, filled, verified and sealed. It belongs to an attachment of the pool's
own, because no node writes there: neither does it end with whoever asked first, nor must its places be used for
anything else while it is under way. Two prompts that lack the same block wait for the same arrival.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton import log
from baton.clock import Clock
from baton.errors import BatonError
from baton.pool_terms import Elsewhere
from kv_pool.core.chain import Chain
from kv_pool.core.disk import Move
from kv_pool.core.holders import Found, Granted, Holder, Publication
from kv_pool.core.pool import Pool

_MOST = 16  # at a time
HOLDER = Holder("arrivals")

# Fills the places of a publication. Returns the XXH3 of those of its first blocks that are whole, and are what they
# should be; until it returns or raises it may write to the places, and then never again.
Fetch = Callable[[Publication], Awaitable[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks `first` to `end` of `chain`, which are not in memory. `token_seconds`: what the node that asks takes to
    compute a token, None if it has not said. `elsewhere`: another host's pool that may have them."""

    chain: Chain
    first: int
    end: int
    token_seconds: float | None
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """To bring the wanted blocks up to `end` here, from `tier`. `patience`: seconds after which computing them would
    have been as quick. `let_go` is called once, when it has been fetched, or was not taken."""

    tier: str
    end: int
    patience: float
    fetch: Fetch
    let_go: Callable[[], None] = lambda: None


class Source(Protocol):
    """Where blocks can come from."""

    def offer(self, wanted: Wanted, now: float) -> Offer | None:
        """None if it has none of them, or computing them is quicker."""
        ...


@dataclass(slots=True, eq=False)
class Arrival:
    """`blocks`: how many come from `tier`. `over`: they are findable, or will not be."""

    tier: str
    blocks: int
    patience: float
    since: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Arrivals:
    """`carry_out` is told what goes to disk to make room for an arrival, and returns what is to be waited for before
    its places are written to, if anything; `sealed` is told the blocks that have come, with their checksums."""

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        *,
        carry_out: Callable[[Sequence[Move]], Awaitable[None] | None],
        sealed: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.sources: list[Source] = []  # asked in this order
        self.counters = {"baton_pool_loads_total": 0.0, "baton_pool_load_failures_total": 0.0}
        self._pool = pool
        self._clock = clock
        self._carry_out = carry_out
        self._sealed = sealed
        self._under_way: dict[bytes, Arrival] = {}  # by the name of the first block
        self._tasks: set[asyncio.Task[None]] = set()
        pool.attach(HOLDER, clock())

    def expect(
        self,
        chain: Chain,
        found: Found,
        most: int,
        token_seconds: float | None,
        elsewhere: Elsewhere | None = None,
    ) -> Arrival | None:
        """What brings the block that goes on where `found`, a match of `chain`, ends: under way already, or begun now,
        of at most `most` blocks of the chain. None if nothing does."""
        wanted = Wanted(chain, len(found.blocks), most, token_seconds, elsewhere)
        if wanted.first >= wanted.end:
            return None
        now = self._clock()
        arrival = self._under_way.get(chain.name(wanted.first))
        if arrival is not None:  # one that takes longer than it should is not waited for by anybody else
            return arrival if now < arrival.since + arrival.patience else None
        if len(self._under_way) >= _MOST:
            return None
        for source in self.sources:
            offer = source.offer(wanted, now)
            if offer is not None:
                return self._begin(wanted, offer)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, wanted: Wanted, offer: Offer) -> Arrival | None:
        granted = self._pool.reserve(HOLDER, wanted.chain, wanted.first, self._clock(), end=offer.end)
        room_made = self._carry_out(self._pool.take_moves())
        if granted.publication is None:
            offer.let_go()
            return None
        arrival = Arrival(offer.tier, len(granted.blocks), offer.patience, self._clock())
        self._under_way[wanted.chain.name(wanted.first)] = arrival
        task = asyncio.create_task(self._bring(arrival, wanted, granted, room_made, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return arrival

    async def _bring(
        self, arrival: Arrival, wanted: Wanted, granted: Granted, room_made: Awaitable[None] | None, offer: Offer
    ) -> None:
        assert granted.publication is not None
        written = self._pool.writing(HOLDER, granted.publication)
        whole: Sequence[int] = ()
        try:
            if room_made is not None:
                await room_made
            whole = await offer.fetch(written)
        except BatonError as error:
            log.get("pool").info("blocks did not come", code=error.code, reason=error.message)
        except Exception as error:  # a defect of a source costs a computation, not places that are never free again
            log.get("pool").error("a source of blocks failed", kind=type(error).__name__, places=log.places(error))
        finally:
            offer.let_go()
        self._sealed(granted.blocks[: len(whole)], whole)
        found = self._pool.seal(HOLDER, granted.publication, len(whole), self._clock())
        self._count("baton_pool_loads_total" if len(whole) == len(granted.blocks) else "baton_pool_load_failures_total")
        del self._under_way[wanted.chain.name(wanted.first)]
        arrival.over.set()
        if found.pin is not None:  # until those who wait, and are called before this, have pins of their own
            asyncio.get_running_loop().call_soon(self._pool.release, HOLDER, found.pin)

    def _count(self, name: str) -> None:
        self.counters[name] += 1
