"""The pool of one host: answers its clients' requests, all on one event loop.

It serves one model, that of the first node that attaches; the segment is created then, because only
then is the size of a block known. An attachment has ended when the pool can lock its byte of the
fence file, which the node keeps locked as long as it uses the segment.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from baton.errors import ChecksumMismatch, ConfigError, InvalidRequest, LayoutMismatch, StaleMessage
from baton.kv.block_hash import BlockHash
from baton.kv.cache_journal import CacheJournal
from baton.kv.kv_layout import KVLayout
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
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.core.ledger import PoolLedger
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.block_loader import BlockSource, PendingBlocks
from kv_pool.memory.pending_publications import PendingPublications
from kv_pool.memory.segment_store import make_store
from kv_pool.service.open_pool import OpenPool
from kv_pool.service.requests import AttachRequest, PoolClientSession, PrefixQuery

_MAX_UNFINISHED_PUBLICATIONS = 16  # of one attachment


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
        self.counters: dict[str, float] = {}
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
        self._fences: dict[PoolClientId, int] = {}  # byte of the fence file by attachment
        self._pending_publications = PendingPublications(clock)
        self._removal_timer: asyncio.TimerHandle | None = None
        self._log = log.get_logger("pool")

    @property
    def model_digest(self) -> str:
        return self._current.model_digest

    @property
    def layout(self) -> KVLayout:
        return self._current.layout

    @property
    def block_pool(self) -> SharedBlockPool:
        return self._current.block_pool

    @property
    def segment_name(self) -> str:
        """The name of the segment."""
        return self._current.store.name

    @property
    def segment_memory(self) -> memoryview:
        """The memory of the segment."""
        return self._current.store.view

    async def compute_checksums(self, blocks: Sequence[int]) -> Sequence[int]:
        return await self._current.store.compute_checksums(blocks)

    @property
    def _current(self) -> OpenPool:
        if self._open_pool is None:
            raise StaleMessage("the pool has no segment yet")
        return self._open_pool

    def list_block_hashes(self, first: int, last: int) -> Iterator[BlockHash]:
        """Return the hashes of those of the blocks `first` to `last` that are in the index."""
        index = self.block_pool.memory.index
        last = min(last, self.block_pool.memory.num_blocks)
        return (
            BlockHash(index.block_hash(block)) for block in range(first, last) if block in index
        )

    def collect_counters(self) -> dict[str, float]:
        """Return counters and gauges by metric."""
        current, memory = self._current, self.block_pool.memory
        own = {
            'baton_pool_evictions_total{tier="memory"}': float(memory.num_evictions),
            "baton_pool_bytes": float(len(memory.index) * self.layout.block_bytes),
            "baton_pool_pins": float(self.block_pool.num_pins),
        }
        disk = current.disk.counters() if current.disk else {}
        return self.counters | current.loader.counters | own | disk

    def disk_ledger(self) -> PoolLedger | None:
        """Return the ledger of the disk's slots, if there is a disk."""
        disk = self._current.disk
        return disk.ledger(self._clock()) if disk else None

    # attachments

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
        _require_same("model_digest", request.model_digest, self.model_digest)
        request.layout.require_equal(self.layout, f"node {request.node}")
        self._remove_ended_clients()
        client_id = PoolClientId(
            f"{request.node}/{request.incarnation[:8]}/{next(self._attachment_numbers)}"
        )
        session = PoolClientSession(client_id, self._current.store.fences.allocate_byte())
        self.block_pool.attach_client(client_id, self._clock())
        self._fences[client_id] = session.fence
        self._log.info("node attached", client_id=client_id)
        return session

    def on_stream_ended(self, session: PoolClientSession) -> None:
        """Handle the end of a stream; the fence byte tells when the attachment has ended."""
        self.block_pool.mark_suspect(session.client_id, self._clock())
        self._pending_publications.remove_publisher(session.client_id)
        self._remove_ended_clients()

    def add_block_source(self, source: BlockSource) -> None:
        """Add a source that blocks can be loaded from."""
        self._current.loader.sources.append(source)

    # questions

    def find_prefix(
        self, session: PoolClientSession, query: PrefixQuery
    ) -> tuple[PoolMatch, PendingBlocks | None]:
        """Return what is in memory, and the pending blocks that continue it.

        If there are any, `wait_for_more` returns the rest of the answer.
        """
        FAILPOINTS.hit("pool.find.before")
        found = self._find_in_memory(session, query)
        self._count("baton_pool_finds_total{result=" + ('"hit"}' if found.blocks else '"miss"}'))
        self._count('baton_pool_found_blocks_total{tier="memory"}', len(found.blocks))
        return found, self._find_pending(session, query, found)

    async def wait_for_more(
        self, session: PoolClientSession, query: PrefixQuery, pending: PendingBlocks, known: int
    ) -> PoolMatch:
        """Wait for pending blocks, and for those after them; return the prefix that is then found.

        `known` blocks were found before. Raises StaleMessage if the attachment ends meanwhile.
        """
        found, remote_blocks = PoolMatch(None, array("i")), 0
        while True:
            await pending.done_event.wait()
            if not self.block_pool.is_live(session.client_id):
                raise StaleMessage(f"{session.client_id} is not attached any more")
            before, found = found, self._find_in_memory(session, query)
            if before.pin_id is not None:
                self.block_pool.release_pin(session.client_id, before.pin_id)
            new_blocks = max(0, len(found.blocks) - known)
            self._count(f'baton_pool_found_blocks_total{{tier="{pending.tier}"}}', new_blocks)
            known += new_blocks
            remote_blocks += new_blocks if pending.tier == REMOTE_TIER else 0
            next_pending = self._find_pending(session, query, found) if new_blocks else None
            if next_pending is None:
                return replace(found, remote_blocks=remote_blocks)
            pending = next_pending

    def release_pins(self, session: PoolClientSession, pins: Sequence[int]) -> None:
        """Release pins. Raises InvalidRequest for a pin that the client does not hold."""
        for pin in pins:
            try:
                self.block_pool.release_pin(session.client_id, PinId(pin))
            except KeyError:
                raise InvalidRequest(f"pin {pin} is not one of {session.client_id}'s") from None

    def reserve_blocks(
        self, session: PoolClientSession, chain: PromptChain, first: int
    ) -> tuple[PublicationGrant, Awaitable[None] | None]:
        """Reserve blocks for a publication; see SharedBlockPool.reserve_blocks.

        Also returns an awaitable if something must finish before the client may write to them.
        Raises InvalidRequest when the client has too many unfinished publications.
        """
        client_id = session.client_id
        unfinished = self.block_pool.num_unfinished_publications(client_id)
        if unfinished >= _MAX_UNFINISHED_PUBLICATIONS:
            raise InvalidRequest(
                f"{client_id} has {unfinished} unfinished publications, at most "
                f"{_MAX_UNFINISHED_PUBLICATIONS}: seal or withdraw one"
            )
        granted = self.block_pool.reserve_blocks(client_id, chain, first, self._clock())
        self._pending_publications.add_publication(client_id, chain, granted)
        demoted = self._current.stage_demotions(self.block_pool.take_demotions())
        if granted.publication_id is None and granted.first_block < len(chain):
            self._count("baton_pool_grants_refused_total")
        return granted, demoted

    async def seal_publication(
        self, session: PoolClientSession, publication: int, checksums: Sequence[int]
    ) -> PoolMatch:
        """Verify the blocks of a publication and make them findable; returns them pinned.

        Raises ChecksumMismatch, after the blocks are freed, if one of them is wrong; StaleMessage
        if the attachment ends meanwhile; InvalidRequest for a publication that the client does not
        have.
        """
        client_id, publication_id = session.client_id, PublicationId(publication)
        blocks = self._get_publication(session, publication).blocks
        if len(checksums) != len(blocks):
            raise InvalidRequest(
                f"publication {publication} has {len(blocks)} blocks, "
                f"got {len(checksums)} checksums"
            )
        is_intact = await self._current.store.verify_blocks(blocks, checksums)
        if not self.block_pool.is_live(client_id):
            raise StaleMessage(f"{client_id} is not attached any more")
        self._get_publication(session, publication)  # it may have been sealed or withdrawn
        FAILPOINTS.hit("pool.seal.before")
        if not is_intact:
            self._count("baton_pool_checksum_failures_total")
            self.block_pool.withdraw_publication(client_id, publication_id)
            self._pending_publications.remove_publication(client_id, publication_id)
            raise ChecksumMismatch(f"publication {publication}: a block has a wrong checksum")
        self._current.on_blocks_sealed(blocks, checksums)
        sealed = self.block_pool.seal_publication(
            client_id, publication_id, len(blocks), self._clock()
        )
        self._pending_publications.remove_publication(client_id, publication_id)
        FAILPOINTS.hit("pool.seal.after")
        return sealed

    def withdraw_publication(self, session: PoolClientSession, publication: int) -> None:
        """Withdraw a publication. Raises InvalidRequest for one that the client does not have."""
        self._get_publication(session, publication)
        publication_id = PublicationId(publication)
        self.block_pool.withdraw_publication(session.client_id, publication_id)
        self._pending_publications.remove_publication(session.client_id, publication_id)

    async def close(self) -> None:
        self._closed = True
        if self._removal_timer is not None:
            self._removal_timer.cancel()
        if self._open_pool is not None:
            await self._open_pool.close()

    # internal

    def _find_in_memory(self, session: PoolClientSession, query: PrefixQuery) -> PoolMatch:
        return self.block_pool.find_prefix(
            session.client_id,
            query.chain,
            query.max_tokens,
            self._clock(),
            partial=query.wants_partial,
        )

    def _find_pending(
        self, session: PoolClientSession, query: PrefixQuery, found: PoolMatch
    ) -> PendingBlocks | None:
        """Return the pending blocks after `found`: of a publication, or of a load, started here."""
        chain, token_seconds = query.chain, query.compute_seconds_per_token
        pending = self._pending_publications.find_pending(
            session.client_id, chain, len(found.blocks), query.max_blocks, token_seconds
        )
        if pending is not None:
            return pending
        return self._current.loader.find_or_start_load(
            chain, found, query.max_blocks, token_seconds, query.remote_prefix
        )

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
            first_client, store, self._disk_settings, self._make_evictor, self._clock
        )
        self.block_pool.memory.add_listeners(
            on_insert=self._on_block_inserted, on_remove=self._on_block_removed
        )
        self._log.info(
            "segment created",
            segment=store.name,
            blocks=len(store.rows),
            block_bytes=self.layout.block_bytes,
        )
        self._on_opened()

    def _get_publication(self, session: PoolClientSession, publication: int) -> Publication:
        try:
            return self.block_pool.get_publication(session.client_id, PublicationId(publication))
        except KeyError:
            raise InvalidRequest(
                f"publication {publication} is not one of {session.client_id}'s"
            ) from None

    def _remove_ended_clients(self) -> None:
        """Try to lock the fence byte of each suspect client, and remove those that have ended.

        For the others it is tried again after RETRY_SECONDS.
        """
        if self._closed:
            return
        for client_id in self.block_pool.suspect_clients:
            if self._current.store.fences.try_close_byte(self._fences[client_id]):
                del self._fences[client_id]
                self.block_pool.remove_client(client_id)
                self._log.info("node detached", client_id=client_id)
        if self.block_pool.suspect_clients and self._removal_timer is None:
            self._removal_timer = asyncio.get_running_loop().call_later(
                RETRY_SECONDS, self._retry_removal
            )

    def _retry_removal(self) -> None:
        self._removal_timer = None
        self._remove_ended_clients()

    def _on_block_inserted(self, block: int) -> None:
        self.cache_journal.record_insertion(
            BlockHash(self.block_pool.memory.index.block_hash(block))
        )
        self._count("baton_pool_inserted_blocks_total")
        self._on_changed()

    def _on_block_removed(self, block: int) -> None:
        self.cache_journal.record_eviction(
            BlockHash(self.block_pool.memory.index.block_hash(block))
        )
        self._on_changed()

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount


def _require_same(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise LayoutMismatch(f"{field} is {theirs!r}, the pool has {ours!r}")
