"""Blocks that are not in the pool's memory yet: loads, and publications that nodes are writing.

`BlockLoader` loads blocks from disk or from another pool. A load is a publication: blocks are
reserved, filled, verified and sealed. It belongs to a client of the pool itself, because no node
writes the blocks: so it does not end when the node that requested it first goes away, and its
blocks are not reused while it runs. Two prompts that lack the same block wait for the same load.

`PendingPublications` lets look-ups wait for publications. A node that looks up a prompt which
another node has just computed waits for its publication instead of computing the prompt again, but
never longer than computing it would take, nor longer than MAX_WAIT_SECONDS. Publications never wait
for look-ups.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError
from baton.kv.pool_types import RemotePrefix
from baton.process import log
from baton.process.clock import Clock
from kv_pool.common.protocol import LATE_PUBLICATION_SECONDS
from kv_pool.core.blocks.attachments import (
    PoolClientId,
    PoolMatch,
    Publication,
    PublicationGrant,
    PublicationId,
)
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.index.radix_index import PromptChain

_MAX_LOADS = 16  # at the same time
LOADER_CLIENT_ID = PoolClientId("arrivals")  # as operators see it in ledgers

# Fills the blocks of a publication. Returns the checksums (XXH3) of its first blocks, as many as
# were fetched and verified. It must not write to the blocks after it has returned or raised.
FetchBlocks = Callable[[Publication], Awaitable[Sequence[int]]]

MAX_WAIT_SECONDS = LATE_PUBLICATION_SECONDS
_TIER = "memory"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load blocks of a prompt that are not in memory."""

    chain: PromptChain
    first_block: int  # number in the chain
    end_block: int  # number in the chain, exclusive
    compute_seconds_per_token: float | None  # of the node that looks up; None if unknown
    remote_prefix: RemotePrefix | None = None  # another host's pool that may have the blocks


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A source's offer to load the requested blocks up to `end_block`."""

    tier: str  # where the blocks come from
    end_block: int  # number in the chain, exclusive
    max_wait_seconds: float  # waiting longer than this is slower than computing the blocks
    fetch: FetchBlocks
    on_done: Callable[[], None] = lambda: None  # called once: fetched, failed, or not accepted


class BlockSource(Protocol):
    """A place that blocks can be loaded from."""

    def plan_load(self, load_request: LoadRequest, now: float) -> LoadPlan | None:
        """Offer a load; None if the source has none of the blocks or computing is faster."""
        ...


@dataclass(slots=True, eq=False)
class PendingBlocks:
    """Blocks that are on their way into memory."""

    tier: str  # where they come from
    num_blocks: int
    max_wait_seconds: float  # after `started_at`
    started_at: float  # seconds
    # Set when the blocks are findable, or when it is known that they will not be.
    done_event: asyncio.Event = field(default_factory=asyncio.Event)


class BlockLoader:
    """Starts loads and completes them. Belongs to the pool's event loop.

    `stage_demotions` gets the demotions that make room for a load; it returns an awaitable if
    something must finish before the load may write to its blocks. `on_blocks_sealed` gets the
    loaded blocks and their checksums.
    """

    def __init__(
        self,
        pool: SharedBlockPool,
        clock: Clock,
        *,
        stage_demotions: Callable[[Sequence[Demotion]], Awaitable[None] | None],
        on_blocks_sealed: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self.sources: list[BlockSource] = []  # tried in this order
        self.counters = {"baton_pool_loads_total": 0.0, "baton_pool_load_failures_total": 0.0}
        self._pool = pool
        self._clock = clock
        self._stage_demotions = stage_demotions
        self._on_blocks_sealed = on_blocks_sealed
        self._in_flight: dict[bytes, PendingBlocks] = {}  # by hash of the first block
        self._tasks: set[asyncio.Task[None]] = set()
        pool.attachments.attach_client(LOADER_CLIENT_ID, clock())

    def find_or_start_load(
        self,
        chain: PromptChain,
        found: PoolMatch,
        max_blocks: int,
        token_seconds: float | None,
        remote_prefix: RemotePrefix | None = None,
    ) -> PendingBlocks | None:
        """Return the load of the first block after `found`, a match of `chain`; None if none.

        A load of that block in flight is shared, otherwise one is started from the first source
        that offers it, of blocks up to number `max_blocks` of the chain.
        """
        load_request = LoadRequest(
            chain, len(found.blocks), max_blocks, token_seconds, remote_prefix
        )
        if load_request.first_block >= load_request.end_block:
            return None
        now = self._clock()
        pending = self._in_flight.get(chain.block_hash(load_request.first_block))
        if pending is not None:  # no more look-ups wait for a load that is late
            return pending if now < pending.started_at + pending.max_wait_seconds else None
        if len(self._in_flight) >= _MAX_LOADS:
            return None
        for source in self.sources:
            plan = source.plan_load(load_request, now)
            if plan is not None:
                return self._start_load(load_request, plan)
        return None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_load(self, load_request: LoadRequest, plan: LoadPlan) -> PendingBlocks | None:
        chain, first_block = load_request.chain, load_request.first_block
        granted = self._pool.reserve_blocks(
            LOADER_CLIENT_ID, chain, first_block, self._clock(), end=plan.end_block
        )
        demoted = self._stage_demotions(self._pool.take_demotions())
        if granted.publication_id is None:
            plan.on_done()
            return None
        pending = PendingBlocks(
            plan.tier, len(granted.blocks), plan.max_wait_seconds, self._clock()
        )
        self._in_flight[chain.block_hash(first_block)] = pending
        task = asyncio.create_task(self._run_load(pending, load_request, granted, demoted, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pending

    async def _run_load(
        self,
        pending: PendingBlocks,
        load_request: LoadRequest,
        granted: PublicationGrant,
        demoted: Awaitable[None] | None,
        plan: LoadPlan,
    ) -> None:
        assert granted.publication_id is not None
        publication = self._pool.get_publication(LOADER_CLIENT_ID, granted.publication_id)
        checksums: Sequence[int] = ()  # of the blocks that were fetched
        try:
            if demoted is not None:
                await demoted
            checksums = await plan.fetch(publication)
        except BatonError as error:
            log.get_logger("pool").info("block load failed", code=error.code, reason=error.message)
        # A bug in a source must not leave the reserved blocks unusable for ever.
        except Exception as error:
            log.get_logger("pool").error(
                "block source failed",
                error_type=type(error).__name__,
                traceback=log.get_traceback_frames(error),
            )
        finally:
            plan.on_done()
        self._on_blocks_sealed(granted.blocks[: len(checksums)], checksums)
        sealed = self._pool.seal_publication(
            LOADER_CLIENT_ID, granted.publication_id, len(checksums), self._clock()
        )
        is_complete = len(checksums) == len(granted.blocks)
        self._count("baton_pool_loads_total" if is_complete else "baton_pool_load_failures_total")
        del self._in_flight[load_request.chain.block_hash(load_request.first_block)]
        pending.done_event.set()
        if sealed.pin_id is not None:
            # Released only after the waiting look-ups, which run first, have pins of their own.
            asyncio.get_running_loop().call_soon(
                self._pool.release_pin, LOADER_CLIENT_ID, sealed.pin_id
            )

    def _count(self, name: str) -> None:
        self.counters[name] += 1


@dataclass(frozen=True, slots=True)
class _PendingPublication:
    publisher: PoolClientId
    block_hash: bytes  # of the first block that is written
    pending: PendingBlocks
    timer: asyncio.TimerHandle  # ends all waits after MAX_WAIT_SECONDS


class PendingPublications:
    """The unfinished publications of all nodes. Belongs to the pool's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_publication: dict[tuple[PoolClientId, PublicationId], _PendingPublication] = {}
        self._by_block_hash: dict[bytes, _PendingPublication] = {}

    def __len__(self) -> int:
        return len(self._by_publication)

    def add_publication(
        self, publisher: PoolClientId, chain: PromptChain, granted: PublicationGrant
    ) -> None:
        """Record a publication, unless no blocks were granted.

        If two publications write the same block, look-ups wait for the first of them.
        """
        if granted.publication_id is None:
            return
        block_hash = chain.block_hash(granted.first_block)
        pending = PendingBlocks(_TIER, len(granted.blocks), MAX_WAIT_SECONDS, self._clock())
        timer = asyncio.get_running_loop().call_later(MAX_WAIT_SECONDS, pending.done_event.set)
        publication = _PendingPublication(publisher, block_hash, pending, timer)
        self._by_publication[publisher, granted.publication_id] = publication
        self._by_block_hash.setdefault(block_hash, publication)

    def find_pending(
        self,
        reader: PoolClientId,
        chain: PromptChain,
        first: int,
        end: int,
        token_seconds: float | None,
    ) -> PendingBlocks | None:
        """Return the pending blocks from block `first` to `end` of `chain`, if worth waiting for.

        They are if `reader` would take longer to compute them, at `token_seconds` per token.
        `reader` never waits for its own publications, because it has their blocks.
        """
        publication = self._by_block_hash.get(chain.block_hash(first)) if first < end else None
        if publication is None or publication.publisher == reader:
            return None
        pending = publication.pending
        if pending.done_event.is_set():
            return None
        num_blocks = min(pending.num_blocks, end - first)
        max_wait = MAX_WAIT_SECONDS
        if token_seconds is not None:
            max_wait = min(max_wait, token_seconds * num_blocks * chain.block_size)
        wait_left = pending.started_at + max_wait - self._clock()
        if wait_left <= 0:
            return None
        return PendingBlocks(_TIER, num_blocks, wait_left, pending.started_at, pending.done_event)

    def remove_publication(self, publisher: PoolClientId, publication: PublicationId) -> None:
        """End all waits for a publication that was sealed or withdrawn. Idempotent."""
        removed = self._by_publication.pop((publisher, publication), None)
        if removed is not None:
            removed.timer.cancel()
            removed.pending.done_event.set()
            if self._by_block_hash.get(removed.block_hash) is removed:
                del self._by_block_hash[removed.block_hash]

    def remove_publisher(self, publisher: PoolClientId) -> None:
        """End all waits for the publications of a client whose stream has ended."""
        for key in [key for key in self._by_publication if key[0] == publisher]:
            self.remove_publication(*key)
