"""The pool of one host: opens its segment, attaches clients and removes those that have ended.

It serves one model, that of the first node that attaches; the segment is created then, because only
then is the size of a block known. An attachment has ended when the pool can lock its byte of the
fence file, which the node keeps locked as long as it uses the segment.

Each attached client has a session: its look-ups, pins and publications.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from baton.errors import ChecksumMismatch, ConfigError, InvalidRequest, LayoutMismatch, StaleMessage
from baton.kv.cache_journal import CacheJournal
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.shared_memory.segment import compute_host_id
from baton.types import mint_id
from kv_pool.common.protocol import POOL_PROTOCOL_VERSION, REMOTE_TIER, RETRY_SECONDS
from kv_pool.core.blocks.attachments import (
    PinId,
    PoolClientId,
    PoolMatch,
    Publication,
    PublicationGrant,
    PublicationId,
)
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.pending_blocks import PendingBlocks
from kv_pool.memory.segment_store import make_store
from kv_pool.service.open_pool import AttachRequest, OpenPool, PrefixQuery

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


class PoolManager:
    """The pool of one host, from its start to its end."""

    def __init__(
        self,
        folder: Path,
        size: int,
        make_evictor: EvictorFactory,
        clock: Clock,
        *,
        host_id: str = "",
        disk_settings: DiskSettings | None = None,
        max_tokens: int | None = None,
        on_opened: Callable[[], None] = lambda: None,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """The segment in `folder` gets `size` bytes, or that of `max_tokens` tokens if less.

        `host_id` defaults to that of the folder. `on_opened` is called when the segment exists,
        `on_changed` when blocks were inserted in the index or removed.
        """
        self.incarnation = mint_id(64)
        self.host_id = host_id or compute_host_id(folder)
        self.cache_journal = CacheJournal()
        # Fails with the ConfigError when the segment cannot be created.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder, self._size_bytes, self._make_evictor = folder, size, make_evictor
        self._disk_settings = disk_settings
        self._max_tokens = max_tokens
        self._clock = clock
        self._on_opened, self._on_changed = on_opened, on_changed
        self._open_lock = asyncio.Lock()
        self._open_pool: OpenPool | None = None
        self._closed = False
        self._attachment_numbers = count(1)
        self._fence_bytes: dict[PoolClientId, int] = {}  # of the fence file, by attachment
        self._removal_timer: asyncio.TimerHandle | None = None
        self._log = log.get_logger("pool")

    @property
    def open_pool(self) -> OpenPool:
        """The pool's segment, with its blocks, disk tier and loader.

        Raises StaleMessage until the first client has attached.
        """
        if self._open_pool is None:
            raise StaleMessage("the pool has no segment yet")
        return self._open_pool

    async def attach_client(self, request: AttachRequest) -> PoolClientSession:
        """Attach a node; the first one also opens the pool.

        Raises LayoutMismatch for another host, model or layout. Raises ConfigError when the folder
        cannot hold the segment; then `failure` is set, too.
        """
        request.validate()
        _require_same("protocol_version", request.protocol_version, POOL_PROTOCOL_VERSION)
        _require_same("host_id", request.host_id, self.host_id)
        async with self._open_lock:
            if self._open_pool is None:
                await self._open_segment(request)
        pool = self.open_pool
        _require_same("model_digest", request.model_digest, pool.model_digest)
        request.layout.require_equal(pool.layout, f"node {request.node}")
        self._remove_ended_clients()
        client_id = PoolClientId(
            f"{request.node}/{request.incarnation[:8]}/{next(self._attachment_numbers)}"
        )
        fence_byte = pool.store.fences.allocate_byte()
        pool.block_pool.attachments.attach_client(client_id, self._clock())
        self._fence_bytes[client_id] = fence_byte
        self._log.info("node attached", client_id=client_id)
        return PoolClientSession(pool, client_id, fence_byte, self._clock)

    def on_stream_ended(self, session: PoolClientSession) -> None:
        """Handle the end of a stream; the fence byte tells when the attachment has ended."""
        pool = self.open_pool
        pool.block_pool.attachments.mark_suspect(session.client_id, self._clock())
        pool.pending_publications.remove_publisher(session.client_id)
        self._remove_ended_clients()

    async def close(self) -> None:
        self._closed = True
        if self._removal_timer is not None:
            self._removal_timer.cancel()
        if self._open_pool is not None:
            await self._open_pool.close()

    async def _open_segment(self, first_client: AttachRequest) -> None:
        size, layout = self._size_bytes, first_client.layout
        if self._max_tokens is not None:
            size = min(size, self._max_tokens * layout.token_bytes)
        try:
            store = await make_store(self._folder, size, layout, lambda: not self._closed)
        except ConfigError as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise
        self._open_pool = OpenPool(
            first_client,
            store,
            self._disk_settings,
            self._make_evictor,
            self._clock,
            self.cache_journal,
            self._on_changed,
        )
        self._log.info(
            "segment created",
            segment=store.name,
            blocks=len(store.rows),
            block_bytes=layout.block_bytes,
        )
        self._on_opened()

    def _remove_ended_clients(self) -> None:
        """Try to lock the fence byte of each suspect client, and remove those that have ended.

        For the others it is tried again after RETRY_SECONDS.
        """
        if self._closed:
            return
        pool = self.open_pool
        for client_id in pool.block_pool.attachments.suspect_clients:
            if pool.store.fences.try_close_byte(self._fence_bytes[client_id]):
                del self._fence_bytes[client_id]
                pool.block_pool.remove_client(client_id)
                self._log.info("node detached", client_id=client_id)
        if pool.block_pool.attachments.suspect_clients and self._removal_timer is None:
            self._removal_timer = asyncio.get_running_loop().call_later(
                RETRY_SECONDS, self._retry_removal
            )

    def _retry_removal(self) -> None:
        self._removal_timer = None
        self._remove_ended_clients()


def _require_same(field: str, requested: object, own: object) -> None:
    if requested != own:
        raise LayoutMismatch(f"{field} is {requested!r}, the pool has {own!r}")
