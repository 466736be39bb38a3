"""What is on its way into the pool's memory, from disk or from another pool, and who waits for it.

An arrival is a publication: places are reserved, filled, verified and sealed. It belongs to an
attachment of the pool's own, because no node writes there: neither does it end with whoever asked
first, nor must its places be used for anything else while it is under way. Two prompts that lack
the same block wait for the same arrival.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError
from baton.kv.pool_types import RemotePrefix
from baton.process import log
from baton.process.clock import Clock
from kv_pool.core.blocks.attachments import PoolClientId, PoolMatch, Publication, PublicationGrant
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.index.prompt_chain import PromptChain

_MAX_LOADS = 16  # at a time
LOADER_CLIENT_ID = PoolClientId("arrivals")

# Fills the places of a publication. Returns the XXH3 of those of its first blocks that are whole,
# and are what they should be; until it returns or raises it may write to the places, and then never
# again.
FetchBlocks = Callable[[Publication], Awaitable[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Blocks `first_block` to `end_block` of `chain`, which are not in memory.
    `compute_seconds_per_token`: what the node that asks takes to compute a token, None if it has
    not said. `remote_prefix`: another host's pool that may have them."""

    chain: PromptChain
    first_block: int
    end_block: int
    compute_seconds_per_token: float | None
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """To bring the wanted blocks up to `end_block` here, from `tier`. `max_wait_seconds`: seconds
    after which computing them would have been as quick. `on_done` is called once, when it has been
    fetched, or was not taken."""

    tier: str
    end_block: int
    max_wait_seconds: float
    fetch: FetchBlocks
    on_done: Callable[[], None] = lambda: None


class BlockSource(Protocol):
    """Where blocks can come from."""

    def plan_load(self, wanted: LoadRequest, now: float) -> LoadPlan | None:
        """None if it has none of them, or computing them is quicker."""
        ...


@dataclass(slots=True, eq=False)
class PendingBlocks:
    """`num_blocks`: how many come from `tier`. `done_event`: they are findable, or will not be."""

    tier: str
    num_blocks: int
    max_wait_seconds: float
    started_at: float
    done_event: asyncio.Event = field(default_factory=asyncio.Event)


class BlockLoader:
    """`carry_out` is told what goes to disk to make room for an arrival, and returns what is to be
    waited for before its places are written to, if anything; `sealed` is told the blocks that have
    come, with their checksums."""

    def __init__(
        self,
        pool: SharedBlockPool,
        clock: Clock,
        *,
        carry_out: Callable[[Sequence[Demotion]], Awaitable[None] | None],
        sealed: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.sources: list[BlockSource] = []  # asked in this order
        self.counters = {"baton_pool_loads_total": 0.0, "baton_pool_load_failures_total": 0.0}
        self._pool = pool
        self._clock = clock
        self._stage_demotions = carry_out
        self._on_blocks_sealed = sealed
        self._in_flight: dict[bytes, PendingBlocks] = {}  # by the name of the first block
        self._tasks: set[asyncio.Task[None]] = set()
        pool.attach_client(LOADER_CLIENT_ID, clock())

    def find_or_start_load(
        self,
        chain: PromptChain,
        found: PoolMatch,
        most: int,
        token_seconds: float | None,
        elsewhere: RemotePrefix | None = None,
    ) -> PendingBlocks | None:
        """What brings the block that goes on where `found`, a match of `chain`, ends: under way
        already, or begun now, of at most `most` blocks of the chain. None if nothing does."""
        wanted = LoadRequest(chain, len(found.blocks), most, token_seconds, elsewhere)
        if wanted.first_block >= wanted.end_block:
            return None
        now = self._clock()
        arrival = self._in_flight.get(chain.block_hash(wanted.first_block))
        if (
            arrival is not None
        ):  # one that takes longer than it should is not waited for by anybody else
            return arrival if now < arrival.started_at + arrival.max_wait_seconds else None
        if len(self._in_flight) >= _MAX_LOADS:
            return None
        for source in self.sources:
            offer = source.plan_load(wanted, now)
            if offer is not None:
                return self._start_load(wanted, offer)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_load(self, wanted: LoadRequest, offer: LoadPlan) -> PendingBlocks | None:
        granted = self._pool.reserve_blocks(
            LOADER_CLIENT_ID, wanted.chain, wanted.first_block, self._clock(), end=offer.end_block
        )
        room_made = self._stage_demotions(self._pool.take_demotions())
        if granted.publication_id is None:
            offer.on_done()
            return None
        arrival = PendingBlocks(
            offer.tier, len(granted.blocks), offer.max_wait_seconds, self._clock()
        )
        self._in_flight[wanted.chain.block_hash(wanted.first_block)] = arrival
        task = asyncio.create_task(self._run_load(arrival, wanted, granted, room_made, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return arrival

    async def _run_load(
        self,
        arrival: PendingBlocks,
        wanted: LoadRequest,
        granted: PublicationGrant,
        room_made: Awaitable[None] | None,
        offer: LoadPlan,
    ) -> None:
        assert granted.publication_id is not None
        written = self._pool.get_publication(LOADER_CLIENT_ID, granted.publication_id)
        whole: Sequence[int] = ()
        try:
            if room_made is not None:
                await room_made
            whole = await offer.fetch(written)
        except BatonError as error:
            log.get_logger("pool").info(
                "blocks did not come", code=error.code, reason=error.message
            )
        # a defect of a source costs a computation, not places that are never free again
        except Exception as error:
            log.get_logger("pool").error(
                "a source of blocks failed",
                kind=type(error).__name__,
                places=log.get_traceback_places(error),
            )
        finally:
            offer.on_done()
        self._on_blocks_sealed(granted.blocks[: len(whole)], whole)
        found = self._pool.seal_publication(
            LOADER_CLIENT_ID, granted.publication_id, len(whole), self._clock()
        )
        self._count(
            "baton_pool_loads_total"
            if len(whole) == len(granted.blocks)
            else "baton_pool_load_failures_total"
        )
        del self._in_flight[wanted.chain.block_hash(wanted.first_block)]
        arrival.done_event.set()
        if (
            found.pin_id is not None
        ):  # until those who wait, and are called before this, have pins of their own
            asyncio.get_running_loop().call_soon(
                self._pool.release_pin, LOADER_CLIENT_ID, found.pin_id
            )

    def _count(self, name: str) -> None:
        self.counters[name] += 1
