"""The pool of one host: the pure core, and the memory that it decides about. All on one event loop.

It serves one model, that of the first node that attaches; the segment is made then, because only
then is the size of a block known. Attachments end by their own goodbye or by proof: their byte of
the fence file is obtained.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from baton.errors import ChecksumMismatch, ConfigError, InvalidRequest, LayoutMismatch, StaleMessage
from baton.kv.block_hash import BlockHash
from baton.kv.cache_journal import CacheJournal
from baton.kv.kv_layout import DTYPE_BYTES, KVLayout
from baton.kv.pool_types import RemotePrefix
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.shared_memory.segment import compute_host_id as host_of
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
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.core.ledger import PoolLedger
from kv_pool.disk.disk_tier import DiskTier
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.block_loader import BlockLoader, BlockSource, PendingBlocks
from kv_pool.memory.pending_publications import PendingPublications
from kv_pool.memory.segment_store import SegmentStore, make_store

_MAX_UNFINISHED_PUBLICATIONS = 16  # unfinished, of one attachment


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What a node says of itself when it attaches. `model_digest` in hex."""

    protocol_version: int
    node: str
    incarnation: str
    host_id: str
    model_digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class PoolClientSession:
    """A live attachment as its stream knows it. `fence`: the byte that it is to lock."""

    client_id: PoolClientId
    fence: int


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """The longest prefix of `chain` that may be read, of at most `max_tokens`; with `wants_partial`
    the block that goes on from there, too. `compute_seconds_per_token`: what the node takes to
    compute a token, None if it does not know. `remote_prefix`: another host's pool that may have
    more of it."""

    chain: PromptChain
    max_tokens: int
    wants_partial: bool = True
    compute_seconds_per_token: float | None = None
    remote_prefix: RemotePrefix | None = None


class _OpenPool:
    """Everything that there is from the first attachment on."""

    def __init__(
        self,
        applicant: AttachRequest,
        store: SegmentStore,
        terms: DiskSettings | None,
        eviction: EvictorFactory,
        clock: Clock,
    ) -> None:
        self.model_digest, self.layout = applicant.model_digest, applicant.layout
        self.store = store
        blocks, tokens = len(store.rows), applicant.layout.block_size
        self.block_pool = SharedBlockPool(CacheTier(blocks, tokens, eviction(blocks, tokens)))
        self.disk = (
            DiskTier(terms, eviction, self.block_pool, store, self.model_digest, self.layout, clock)
            if terms
            else None
        )
        self.loader = BlockLoader(
            self.block_pool, clock, carry_out=self.stage_demotions, sealed=self.on_blocks_sealed
        )
        self.loader.sources += [self.disk] if self.disk else []

    def stage_demotions(self, moves: Sequence[Demotion]) -> Awaitable[None] | None:
        return self.disk.stage_demotions(moves) if self.disk else None

    def on_blocks_sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        if self.disk is not None:
            self.disk.on_blocks_sealed(blocks, checksums)

    async def close(self) -> None:
        await self.loader.close()
        if self.disk is not None:
            await self.disk.close()
        self.store.close()


class PoolManager:
    """`size` of the segment in bytes, and at most that of `most_tokens` tokens; `host_id` is that
    of the folder by default; `disk`: none if None. `opened` is called when there is a segment,
    `changed` when the index has gained or lost blocks."""

    def __init__(
        self,
        folder: Path,
        size: int,
        eviction: EvictorFactory,
        clock: Clock,
        *,
        host_id: str = "",
        disk: DiskSettings | None = None,
        most_tokens: int | None = None,
        opened: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.incarnation = mint_id(64)
        self.host_id = host_id or host_of(folder)
        self.cache_journal = CacheJournal()
        self.counters: dict[str, float] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder, self._size_bytes, self._make_evictor = folder, size, eviction
        self._disk_settings = disk
        self._max_tokens = most_tokens
        self._clock = clock
        self._on_opened, self._on_changed = opened, changed
        self._open_lock = asyncio.Lock()
        self._open_pool: _OpenPool | None = None
        self._closed = False
        self._attachment_numbers = count(1)
        self._fences: dict[PoolClientId, int] = {}
        self._pending_publications = PendingPublications(clock)
        self._close_off_timer: asyncio.TimerHandle | None = None
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
        """Its name."""
        return self._current.store.name

    @property
    def segment_memory(self) -> memoryview:
        """Of the segment."""
        return self._current.store.view

    async def compute_checksums(self, blocks: Sequence[int]) -> Sequence[int]:
        return await self._current.store.compute_checksums(blocks)

    @property
    def _current(self) -> _OpenPool:
        if self._open_pool is None:
            raise StaleMessage("the pool has no segment yet")
        return self._open_pool

    def list_block_hashes(self, first: int, last: int) -> Iterator[BlockHash]:
        """Of those of the blocks `first` to `last` that are in the index."""
        index = self.block_pool.memory.index
        last = min(last, self.block_pool.memory.num_blocks)
        return (
            BlockHash(index.block_hash(block)) for block in range(first, last) if block in index
        )

    def collect_counters(self) -> dict[str, float]:
        """And gauges: what is there now."""
        it, memory = self._current, self.block_pool.memory
        own = {
            'baton_pool_evictions_total{tier="memory"}': float(memory.num_evictions),
            "baton_pool_bytes": float(len(memory.index) * self.layout.block_bytes),
            "baton_pool_pins": float(self.block_pool.num_pins),
        }
        return self.counters | it.loader.counters | own | (it.disk.counters() if it.disk else {})

    def disk_ledger(self) -> PoolLedger | None:
        """Of the disk's slots, if there is one."""
        disk = self._current.disk
        return disk.ledger(self._clock()) if disk else None

    # attachments

    async def attach_client(self, applicant: AttachRequest) -> PoolClientSession:
        """Raises LayoutMismatch for another host, model or geometry, and ConfigError when the
        folder cannot hold the segment; then the pool has `failure`, too."""
        _check_attach_request(applicant)
        _require_same("protocol_version", applicant.protocol_version, POOL_PROTOCOL_VERSION)
        _require_same("host_id", applicant.host_id, self.host_id)
        async with self._open_lock:
            if self._open_pool is None:
                await self._open_segment(applicant)
        _require_same("model_digest", applicant.model_digest, self.model_digest)
        applicant.layout.require_equal(self.layout, f"node {applicant.node}")
        self._close_off_suspects()
        holder = PoolClientId(
            f"{applicant.node}/{applicant.incarnation[:8]}/{next(self._attachment_numbers)}"
        )
        desk = PoolClientSession(holder, self._current.store.fences.allocate_byte())
        self.block_pool.attach_client(holder, self._clock())
        self._fences[holder] = desk.fence
        self._log.info("node attached", holder=holder)
        return desk

    def on_stream_ended(self, desk: PoolClientSession) -> None:
        """Its stream has, with a goodbye or without: either way its byte tells."""
        self.block_pool.mark_suspect(desk.client_id, self._clock())
        self._pending_publications.remove_publisher(desk.client_id)
        self._close_off_suspects()

    def add_block_source(self, source: BlockSource) -> None:
        """Where blocks can come from that are not here."""
        self._current.loader.sources.append(source)

    # questions

    def find_prefix(
        self, desk: PoolClientSession, asked: PrefixQuery
    ) -> tuple[PoolMatch, PendingBlocks | None]:
        """What is here, and what brings more: then `wait_for_more` has the rest of the answer."""
        FAILPOINTS.hit("pool.find.before")
        found = self._find_in_memory(desk, asked)
        self._count("baton_pool_finds_total{result=" + ('"hit"}' if found.blocks else '"miss"}'))
        self._count('baton_pool_found_blocks_total{tier="memory"}', len(found.blocks))
        return found, self._find_pending(desk, asked, found)

    async def wait_for_more(
        self, desk: PoolClientSession, asked: PrefixQuery, arrival: PendingBlocks, known: int
    ) -> PoolMatch:
        """What is here when nothing more comes; `known` blocks were before. Raises Stale if the
        attachment is over by then."""
        found, waiting, remote = PoolMatch(None, array("i")), arrival, 0
        while True:
            await waiting.done_event.wait()
            if not self.block_pool.is_live(desk.client_id):
                raise StaleMessage(f"{desk.client_id} is not attached any more")
            before, found = found, self._find_in_memory(desk, asked)
            if before.pin_id is not None:
                self.block_pool.release_pin(desk.client_id, before.pin_id)
            came = max(0, len(found.blocks) - known)
            self._count(f'baton_pool_found_blocks_total{{tier="{waiting.tier}"}}', came)
            known += came
            remote += came if waiting.tier == REMOTE_TIER else 0
            following = self._find_pending(desk, asked, found) if came else None
            if following is None:
                return replace(found, remote_blocks=remote)
            waiting = following

    def release_pins(self, desk: PoolClientSession, pins: Sequence[int]) -> None:
        """Raises InvalidRequest for a pin that it does not hold."""
        for pin in pins:
            try:
                self.block_pool.release_pin(desk.client_id, PinId(pin))
            except KeyError:
                raise InvalidRequest(f"pin {pin} is not one of {desk.client_id}'s") from None

    def reserve_blocks(
        self, desk: PoolClientSession, chain: PromptChain, first: int
    ) -> tuple[PublicationGrant, Awaitable[None] | None]:
        """Places, and what is to be waited for before they are written to. Raises InvalidRequest
        when it has too many unfinished publications."""
        if (
            self.block_pool.num_unfinished_publications(desk.client_id)
            >= _MAX_UNFINISHED_PUBLICATIONS
        ):
            raise InvalidRequest(
                f"{desk.client_id} has {_MAX_UNFINISHED_PUBLICATIONS} unfinished publications: seal or withdraw one"
            )
        granted = self.block_pool.reserve_blocks(desk.client_id, chain, first, self._clock())
        self._pending_publications.add_publication(desk.client_id, chain, granted)
        room_made = self._current.stage_demotions(self.block_pool.take_demotions())
        if granted.publication_id is None and granted.first_block < len(chain):
            self._count("baton_pool_grants_refused_total")
        return granted, room_made

    async def seal_publication(
        self, desk: PoolClientSession, publication: int, checksums: Sequence[int]
    ) -> PoolMatch:
        """Raises ChecksumMismatch if a copy is not whole; its places are free then. Raises Stale if
        the attachment is over by then, and InvalidRequest for what it has not reserved."""
        number = PublicationId(publication)
        blocks = self._get_publication(desk, publication).blocks
        if len(checksums) != len(blocks):
            raise InvalidRequest(
                f"publication {publication} has {len(blocks)} blocks, {len(checksums)} checksums came"
            )
        whole = await self._current.store.verify_blocks(blocks, checksums)
        if not self.block_pool.is_live(desk.client_id):
            raise StaleMessage(f"{desk.client_id} is not attached any more")
        self._get_publication(desk, publication)  # unless it was sealed or withdrawn meanwhile
        FAILPOINTS.hit("pool.seal.before")
        if not whole:
            self._count("baton_pool_checksum_failures_total")
            self.block_pool.withdraw_publication(desk.client_id, number)
            self._pending_publications.remove_publication(desk.client_id, number)
            raise ChecksumMismatch(
                f"publication {publication}: a copy is not what its checksum says"
            )
        self._current.on_blocks_sealed(blocks, checksums)
        found = self.block_pool.seal_publication(desk.client_id, number, len(blocks), self._clock())
        self._pending_publications.remove_publication(desk.client_id, number)
        FAILPOINTS.hit("pool.seal.after")
        return found

    def withdraw_publication(self, desk: PoolClientSession, publication: int) -> None:
        """Raises InvalidRequest for what it has not reserved."""
        self._get_publication(desk, publication)
        self.block_pool.withdraw_publication(desk.client_id, PublicationId(publication))
        self._pending_publications.remove_publication(desk.client_id, PublicationId(publication))

    async def close(self) -> None:
        self._closed = True
        if self._close_off_timer is not None:
            self._close_off_timer.cancel()
        if self._open_pool is not None:
            await self._open_pool.close()

    # inside

    def _find_in_memory(self, desk: PoolClientSession, asked: PrefixQuery) -> PoolMatch:
        return self.block_pool.find_prefix(
            desk.client_id,
            asked.chain,
            asked.max_tokens,
            self._clock(),
            partial=asked.wants_partial,
        )

    def _find_pending(
        self, desk: PoolClientSession, asked: PrefixQuery, found: PoolMatch
    ) -> PendingBlocks | None:
        size = (
            asked.chain.block_size
        )  # of a last block that is wanted in part all of it has to come
        most = min(
            len(asked.chain),
            -(-asked.max_tokens // size) if asked.wants_partial else asked.max_tokens // size,
        )
        first, seconds = len(found.blocks), asked.compute_seconds_per_token
        published = self._pending_publications.find_pending(
            desk.client_id, asked.chain, first, min(most, len(asked.chain)), seconds
        )
        if published is not None:
            return published
        return self._current.loader.find_or_start_load(
            asked.chain, found, most, asked.compute_seconds_per_token, asked.remote_prefix
        )

    async def _open_segment(self, applicant: AttachRequest) -> None:
        size, layout = self._size_bytes, applicant.layout
        if self._max_tokens is not None:
            size = min(size, self._max_tokens * layout.token_bytes)
        try:
            store = await make_store(self._folder, size, layout, lambda: not self._closed)
        except ConfigError as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise
        self._open_pool = _OpenPool(
            applicant, store, self._disk_settings, self._make_evictor, self._clock
        )
        self.block_pool.memory.add_listeners(
            on_insert=self._on_block_inserted, on_remove=self._on_block_removed
        )
        self._log.info(
            "segment made",
            segment=store.name,
            blocks=len(store.rows),
            block_bytes=self.layout.block_bytes,
        )
        self._on_opened()

    def _get_publication(self, desk: PoolClientSession, publication: int) -> Publication:
        try:
            return self.block_pool.get_publication(desk.client_id, PublicationId(publication))
        except KeyError:
            raise InvalidRequest(
                f"publication {publication} is not one of {desk.client_id}'s"
            ) from None

    def _close_off_suspects(self) -> None:
        """Try the byte of everybody who is doubtful, and again after RETRY of those that keep
        it."""
        if self._closed:
            return
        for holder in self.block_pool.suspect_clients:
            if self._current.store.fences.try_close_byte(self._fences[holder]):
                del self._fences[holder]
                self.block_pool.remove_client(holder)
                self._log.info("node detached", holder=holder)
        if self.block_pool.suspect_clients and self._close_off_timer is None:
            self._close_off_timer = asyncio.get_running_loop().call_later(
                RETRY_SECONDS, self._retry_close_off
            )

    def _retry_close_off(self) -> None:
        self._close_off_timer = None
        self._close_off_suspects()

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


def _check_attach_request(applicant: AttachRequest) -> None:
    layout = applicant.layout
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
    if layout.dtype not in DTYPE_BYTES or min(sizes) < 1:
        raise LayoutMismatch(f"{layout} is no layout")
    for name in (applicant.node, applicant.incarnation):
        if not name.isprintable():
            raise LayoutMismatch(f"node name {name!r} is not printable")


def _require_same(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise LayoutMismatch(f"{field} is {theirs!r}, the pool has {ours!r}")
