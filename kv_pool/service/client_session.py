"""The session of an attached client: its look-ups, pins and publications."""

from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from baton.errors import ChecksumMismatch, InvalidRequest, StaleMessage
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from kv_pool.common.protocol import REMOTE_TIER
from kv_pool.core.blocks.attachments import (
    PinId,
    PoolClientId,
    PoolMatch,
    Publication,
    PublicationGrant,
    PublicationId,
)
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.memory.pending_blocks import PendingBlocks
from kv_pool.service.open_pool import OpenPool, PrefixQuery

_MAX_UNFINISHED_PUBLICATIONS = 16  # of one attachment


class PoolClientSession:
    """What an attached client asks of the pool, from its attachment to the end of its stream."""

    def __init__(
        self, pool: OpenPool, client_id: PoolClientId, fence_byte: int, clock: Clock
    ) -> None:
        self.client_id = client_id
        self.fence_byte = fence_byte  # byte of the fence file that the node is to lock
        self._pool = pool
        self._block_pool = pool.block_pool
        self._clock = clock

    def find_prefix(self, query: PrefixQuery) -> tuple[PoolMatch, PendingBlocks | None]:
        """Return what is in memory, and the pending blocks that continue it.

        If there are any, `wait_for_more` returns the rest of the answer.
        """
        FAILPOINTS.hit("pool.find.before")
        found = self._find_in_memory(query)
        self._pool.count(
            "baton_pool_finds_total{result=" + ('"hit"}' if found.blocks else '"miss"}')
        )
        self._pool.count('baton_pool_found_blocks_total{tier="memory"}', len(found.blocks))
        return found, self._find_pending(query, found)

    async def wait_for_more(
        self, query: PrefixQuery, pending: PendingBlocks, known: int
    ) -> PoolMatch:
        """Wait for pending blocks, and for those after them; return the prefix that is then found.

        `known` blocks were found before. Raises StaleMessage if the attachment ends meanwhile.
        """
        found, remote_blocks = PoolMatch(None, array("i")), 0
        while True:
            await pending.done_event.wait()
            if not self._block_pool.attachments.is_live(self.client_id):
                raise StaleMessage(f"{self.client_id} is not attached any more")
            before, found = found, self._find_in_memory(query)
            if before.pin_id is not None:
                self._block_pool.release_pin(self.client_id, before.pin_id)
            new_blocks = max(0, len(found.blocks) - known)
            self._pool.count(f'baton_pool_found_blocks_total{{tier="{pending.tier}"}}', new_blocks)
            known += new_blocks
            remote_blocks += new_blocks if pending.tier == REMOTE_TIER else 0
            next_pending = self._find_pending(query, found) if new_blocks else None
            if next_pending is None:
                return replace(found, remote_blocks=remote_blocks)
            pending = next_pending

    def release_pins(self, pins: Sequence[int]) -> None:
        """Release pins. Raises InvalidRequest for a pin that the client does not hold."""
        for pin in pins:
            try:
                self._block_pool.release_pin(self.client_id, PinId(pin))
            except KeyError:
                raise InvalidRequest(f"pin {pin} is not one of {self.client_id}'s") from None

    def reserve_blocks(
        self, chain: PromptChain, first: int
    ) -> tuple[PublicationGrant, Awaitable[None] | None]:
        """Reserve blocks for a publication; see SharedBlockPool.reserve_blocks.

        Also returns an awaitable if something must finish before the client may write to them.
        Raises InvalidRequest when the client has too many unfinished publications.
        """
        unfinished = self._block_pool.attachments.num_unfinished_publications(self.client_id)
        if unfinished >= _MAX_UNFINISHED_PUBLICATIONS:
            raise InvalidRequest(
                f"{self.client_id} has {unfinished} unfinished publications, at most "
                f"{_MAX_UNFINISHED_PUBLICATIONS}: seal or withdraw one"
            )
        granted = self._block_pool.reserve_blocks(self.client_id, chain, first, self._clock())
        self._pool.pending_publications.add_publication(self.client_id, chain, granted)
        demoted = self._pool.stage_demotions(self._block_pool.take_demotions())
        if granted.publication_id is None and granted.first_block < len(chain):
            self._pool.count("baton_pool_grants_refused_total")
        return granted, demoted

    async def seal_publication(self, publication: int, checksums: Sequence[int]) -> PoolMatch:
        """Verify the blocks of a publication and make them findable; returns them pinned.

        Raises ChecksumMismatch, after the blocks are freed, if one of them is wrong; StaleMessage
        if the attachment ends meanwhile; InvalidRequest for a publication that the client does not
        have.
        """
        publication_id = PublicationId(publication)
        blocks = self._get_publication(publication).blocks
        if len(checksums) != len(blocks):
            raise InvalidRequest(
                f"publication {publication} has {len(blocks)} blocks, "
                f"got {len(checksums)} checksums"
            )
        is_intact = await self._pool.store.verify_blocks(blocks, checksums)
        if not self._block_pool.attachments.is_live(self.client_id):
            raise StaleMessage(f"{self.client_id} is not attached any more")
        self._get_publication(publication)  # it may have been sealed or withdrawn
        FAILPOINTS.hit("pool.seal.before")
        if not is_intact:
            self._pool.count("baton_pool_checksum_failures_total")
            self._block_pool.withdraw_publication(self.client_id, publication_id)
            self._pool.pending_publications.remove_publication(self.client_id, publication_id)
            raise ChecksumMismatch(f"publication {publication}: a block has a wrong checksum")
        self._pool.on_blocks_sealed(blocks, checksums)
        sealed = self._block_pool.seal_publication(
            self.client_id, publication_id, len(blocks), self._clock()
        )
        self._pool.pending_publications.remove_publication(self.client_id, publication_id)
        FAILPOINTS.hit("pool.seal.after")
        return sealed

    def withdraw_publication(self, publication: int) -> None:
        """Withdraw a publication. Raises InvalidRequest for one that the client does not have."""
        self._get_publication(publication)
        publication_id = PublicationId(publication)
        self._block_pool.withdraw_publication(self.client_id, publication_id)
        self._pool.pending_publications.remove_publication(self.client_id, publication_id)

    def _find_in_memory(self, query: PrefixQuery) -> PoolMatch:
        return self._block_pool.find_prefix(
            self.client_id,
            query.chain,
            query.max_tokens,
            self._clock(),
            partial=query.wants_partial,
        )

    def _find_pending(self, query: PrefixQuery, found: PoolMatch) -> PendingBlocks | None:
        """Return the pending blocks after `found`: of a publication, or of a load, started here."""
        chain, token_seconds = query.chain, query.compute_seconds_per_token
        pending = self._pool.pending_publications.find_pending(
            self.client_id, chain, len(found.blocks), query.max_blocks, token_seconds
        )
        if pending is not None:
            return pending
        return self._pool.loader.find_or_start_load(
            chain, found, query.max_blocks, token_seconds, query.remote_prefix
        )

    def _get_publication(self, publication: int) -> Publication:
        try:
            return self._block_pool.get_publication(self.client_id, PublicationId(publication))
        except KeyError:
            raise InvalidRequest(
                f"publication {publication} is not one of {self.client_id}'s"
            ) from None
