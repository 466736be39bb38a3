"""Publications that nodes are writing, so that look-ups can wait for them.

A node that looks up a prompt which another node has just computed waits for its publication instead
of computing the prompt again, but never longer than computing it would take, nor longer than
MAX_WAIT_SECONDS. Publications never wait for look-ups.
"""

import asyncio
from dataclasses import dataclass

from baton.process.clock import Clock
from kv_pool.common.protocol import LATE_PUBLICATION_SECONDS
from kv_pool.core.blocks.attachments import PoolClientId, PublicationGrant, PublicationId
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.memory.block_loader import PendingBlocks

MAX_WAIT_SECONDS = LATE_PUBLICATION_SECONDS
_TIER = "memory"


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
