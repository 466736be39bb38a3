"""Nodes' publications that are under way, and who waits for them: a prompt that another node has
just computed is not computed again while it is being copied.

Nobody waits for longer than computing the blocks would take, nor than PATIENCE; a publication waits
for nobody.
"""

import asyncio
from dataclasses import dataclass

from baton.process.clock import Clock
from kv_pool.common.protocol import LATE_PUBLICATION_SECONDS
from kv_pool.core.blocks.attachments import PoolClientId, PublicationGrant, PublicationId
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.memory.block_loader import PendingBlocks

MAX_WAIT_SECONDS = LATE_PUBLICATION_SECONDS  # seconds
_TIER = "memory"


@dataclass(frozen=True, slots=True)
class _PendingPublication:
    publisher: PoolClientId
    block_hash: bytes  # of its first block
    pending: PendingBlocks
    timer: asyncio.TimerHandle


class PendingPublications:
    """On the pool's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_publication: dict[tuple[PoolClientId, PublicationId], _PendingPublication] = {}
        self._by_block_hash: dict[bytes, _PendingPublication] = {}

    def __len__(self) -> int:
        return len(self._by_publication)

    def add_publication(
        self, publisher: PoolClientId, chain: PromptChain, granted: PublicationGrant
    ) -> None:
        """Places have been granted, or none. Of two publications of one block the first is waited
        for."""
        if granted.publication_id is None:
            return
        name = chain.block_hash(granted.first_block)
        arrival = PendingBlocks(_TIER, len(granted.blocks), MAX_WAIT_SECONDS, self._clock())
        timer = asyncio.get_running_loop().call_later(MAX_WAIT_SECONDS, arrival.done_event.set)
        found = _PendingPublication(publisher, name, arrival, timer)
        self._by_publication[publisher, granted.publication_id] = found
        self._by_block_hash.setdefault(name, found)

    def find_pending(
        self,
        reader: PoolClientId,
        chain: PromptChain,
        first: int,
        end: int,
        token_seconds: float | None,
    ) -> PendingBlocks | None:
        """What brings block `first` of `chain`, if `reader` had better wait for it than compute.
        Its own publications are of blocks that it has."""
        found = self._by_block_hash.get(chain.block_hash(first)) if first < end else None
        if found is None or found.publisher == reader or found.pending.done_event.is_set():
            return None
        blocks = min(found.pending.num_blocks, end - first)
        patience = (
            MAX_WAIT_SECONDS
            if token_seconds is None
            else min(MAX_WAIT_SECONDS, token_seconds * blocks * chain.block_size)
        )
        left = found.pending.started_at + patience - self._clock()
        if left <= 0:
            return None
        return PendingBlocks(
            _TIER, blocks, left, found.pending.started_at, found.pending.done_event
        )

    def remove_publication(self, publisher: PoolClientId, publication: PublicationId) -> None:
        """Sealed or withdrawn. Idempotent."""
        found = self._by_publication.pop((publisher, publication), None)
        if found is not None:
            found.timer.cancel()
            found.pending.done_event.set()
            if self._by_block_hash.get(found.block_hash) is found:
                del self._by_block_hash[found.block_hash]

    def remove_publisher(self, publisher: PoolClientId) -> None:
        """Its stream has ended: nobody waits for what it was writing."""
        for one in [key for key in self._by_publication if key[0] == publisher]:
            self.remove_publication(*one)
