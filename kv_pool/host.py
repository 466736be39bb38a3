"""The pool of one host: the pure core, and the memory that it decides about. All on one event loop.

It serves one model, that of the first node that attaches; the segment is made then, because only then is the size of a
block known. Attachments end by their own goodbye or by proof: their byte of the fence file is obtained.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from baton import log
from baton.block_hash import BlockHash
from baton.cache_journal import CacheJournal
from baton.clock import Clock
from baton.errors import ChecksumMismatch, ConfigError, InvalidRequest, LayoutMismatch, Stale
from baton.failpoints import FAILPOINTS
from baton.kv_layout import DTYPE_BYTES, KVLayout
from baton.pool_terms import Elsewhere
from baton.segment import host_id as host_of
from baton.types import mint_id
from kv_pool.arrivals import Arrival, Arrivals, Source
from kv_pool.core.chain import Chain
from kv_pool.core.disk import Move
from kv_pool.core.holders import Found, Granted, Holder, PinId, Publication, PublicationId
from kv_pool.core.ledger import PoolLedger
from kv_pool.core.policies import Eviction
from kv_pool.core.pool import Pool
from kv_pool.core.tier import Tier
from kv_pool.disk_mount import DiskTerms
from kv_pool.disk_tier import DiskTier
from kv_pool.publications import Publications
from kv_pool.store import Store, make
from kv_pool.terms import PROTOCOL_VERSION, REMOTE, RETRY

_PUBLICATIONS = 16  # unfinished, of one attachment


@dataclass(frozen=True, slots=True)
class Applicant:
    """What a node says of itself when it attaches. `digest` in hex."""

    protocol_version: int
    node: str
    process: str
    host_id: str
    digest: str
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Desk:
    """A live attachment as its stream knows it. `fence`: the byte that it is to lock."""

    holder: Holder
    fence: int


@dataclass(frozen=True, slots=True)
class Question:
    """The longest prefix of `chain` that may be read, of at most `most_tokens`; with `partial` the block that goes on
    from there, too. `token_seconds`: what the node takes to compute a token, None if it does not know. `elsewhere`:
    another host's pool that may have more of it."""

    chain: Chain
    most_tokens: int
    partial: bool = True
    token_seconds: float | None = None
    elsewhere: Elsewhere | None = None


class _Open:
    """Everything that there is from the first attachment on."""

    def __init__(
        self, applicant: Applicant, store: Store, terms: DiskTerms | None, eviction: Eviction, clock: Clock
    ) -> None:
        self.digest, self.layout = applicant.digest, applicant.layout
        self.store = store
        blocks, tokens = len(store.rows), applicant.layout.block_size
        self.pool = Pool(Tier(blocks, tokens, eviction(blocks, tokens)))
        self.disk = DiskTier(terms, eviction, self.pool, store, self.digest, self.layout, clock) if terms else None
        self.arrivals = Arrivals(self.pool, clock, carry_out=self.carry_out, sealed=self.sealed)
        self.arrivals.sources += [self.disk] if self.disk else []

    def carry_out(self, moves: Sequence[Move]) -> Awaitable[None] | None:
        return self.disk.carry_out(moves) if self.disk else None

    def sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        if self.disk is not None:
            self.disk.sealed(blocks, checksums)

    async def close(self) -> None:
        await self.arrivals.close()
        if self.disk is not None:
            await self.disk.close()
        self.store.close()


class PoolHost:
    """`size` of the segment in bytes, and at most that of `most_tokens` tokens; `host_id` is that of the folder by
    default; `disk`: none if None. `opened` is called when there is a segment, `changed` when the index has gained or
    lost blocks."""

    def __init__(
        self,
        folder: Path,
        size: int,
        eviction: Eviction,
        clock: Clock,
        *,
        host_id: str = "",
        disk: DiskTerms | None = None,
        most_tokens: int | None = None,
        opened: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.incarnation = mint_id(64)
        self.host_id = host_id or host_of(folder)
        self.journal = CacheJournal()
        self.counters: dict[str, float] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder, self._size, self._eviction = folder, size, eviction
        self._disk_terms = disk
        self._most_tokens = most_tokens
        self._clock = clock
        self._opened, self._changed = opened, changed
        self._opening = asyncio.Lock()
        self._open: _Open | None = None
        self._closed = False
        self._numbers = count(1)
        self._fences: dict[Holder, int] = {}
        self._publications = Publications(clock)
        self._retry: asyncio.TimerHandle | None = None
        self._log = log.get("pool")

    @property
    def digest(self) -> str:
        return self._it.digest

    @property
    def layout(self) -> KVLayout:
        return self._it.layout

    @property
    def pool(self) -> Pool:
        return self._it.pool

    @property
    def segment(self) -> str:
        """Its name."""
        return self._it.store.name

    @property
    def memory(self) -> memoryview:
        """Of the segment."""
        return self._it.store.view

    async def checksums(self, blocks: Sequence[int]) -> Sequence[int]:
        return await self._it.store.checksums(blocks)

    @property
    def _it(self) -> _Open:
        if self._open is None:
            raise Stale("the pool has no segment yet")
        return self._open

    def names(self, first: int, last: int) -> Iterator[BlockHash]:
        """Of those of the blocks `first` to `last` that are in the index."""
        index = self.pool.memory.index
        last = min(last, self.pool.memory.total)
        return (BlockHash(index.name(block)) for block in range(first, last) if block in index)

    def all_counters(self) -> dict[str, float]:
        """And gauges: what is there now."""
        it, memory = self._it, self.pool.memory
        own = {
            'baton_pool_evictions_total{tier="memory"}': float(memory.evictions),
            "baton_pool_bytes": float(len(memory.index) * self.layout.block_bytes),
            "baton_pool_pins": float(self.pool.pins),
        }
        return self.counters | it.arrivals.counters | own | (it.disk.counters() if it.disk else {})

    def disk_ledger(self) -> PoolLedger | None:
        """Of the disk's slots, if there is one."""
        disk = self._it.disk
        return disk.ledger(self._clock()) if disk else None

    # attachments

    async def attach(self, applicant: Applicant) -> Desk:
        """Raises LayoutMismatch for another host, model or geometry, and ConfigError when the folder cannot hold the
        segment; then the pool has `failed`, too."""
        _require_sane(applicant)
        _require("protocol_version", applicant.protocol_version, PROTOCOL_VERSION)
        _require("host_id", applicant.host_id, self.host_id)
        async with self._opening:
            if self._open is None:
                await self._make(applicant)
        _require("model_digest", applicant.digest, self.digest)
        applicant.layout.require_equal(self.layout, f"node {applicant.node}")
        self._prove()
        holder = Holder(f"{applicant.node}/{applicant.process[:8]}/{next(self._numbers)}")
        desk = Desk(holder, self._it.store.fences.mint())
        self.pool.attach(holder, self._clock())
        self._fences[holder] = desk.fence
        self._log.info("node attached", holder=holder)
        return desk

    def ended(self, desk: Desk) -> None:
        """Its stream has, with a goodbye or without: either way its byte tells."""
        self.pool.doubt(desk.holder, self._clock())
        self._publications.all_ended(desk.holder)
        self._prove()

    def add_source(self, source: Source) -> None:
        """Where blocks can come from that are not here."""
        self._it.arrivals.sources.append(source)

    # questions

    def find(self, desk: Desk, asked: Question) -> tuple[Found, Arrival | None]:
        """What is here, and what brings more: then `find_more` has the rest of the answer."""
        FAILPOINTS.hit("pool.find.before")
        found = self._find(desk, asked)
        self._count("baton_pool_finds_total{result=" + ('"hit"}' if found.blocks else '"miss"}'))
        self._count('baton_pool_found_blocks_total{tier="memory"}', len(found.blocks))
        return found, self._expect(desk, asked, found)

    async def find_more(self, desk: Desk, asked: Question, arrival: Arrival, known: int) -> Found:
        """What is here when nothing more comes; `known` blocks were before. Raises Stale if the attachment is over by
        then."""
        found, waiting, remote = Found(None, array("i")), arrival, 0
        while True:
            await waiting.over.wait()
            if not self.pool.is_live(desk.holder):
                raise Stale(f"{desk.holder} is not attached any more")
            before, found = found, self._find(desk, asked)
            if before.pin is not None:
                self.pool.release(desk.holder, before.pin)
            came = max(0, len(found.blocks) - known)
            self._count(f'baton_pool_found_blocks_total{{tier="{waiting.tier}"}}', came)
            known += came
            remote += came if waiting.tier == REMOTE else 0
            following = self._expect(desk, asked, found) if came else None
            if following is None:
                return replace(found, remote=remote)
            waiting = following

    def release(self, desk: Desk, pins: Sequence[int]) -> None:
        """Raises InvalidRequest for a pin that it does not hold."""
        for pin in pins:
            try:
                self.pool.release(desk.holder, PinId(pin))
            except KeyError:
                raise InvalidRequest(f"pin {pin} is not one of {desk.holder}'s") from None

    def reserve(self, desk: Desk, chain: Chain, first: int) -> tuple[Granted, Awaitable[None] | None]:
        """Places, and what is to be waited for before they are written to. Raises InvalidRequest when it has too many
        unfinished publications."""
        if self.pool.unfinished(desk.holder) >= _PUBLICATIONS:
            raise InvalidRequest(f"{desk.holder} has {_PUBLICATIONS} unfinished publications: seal or withdraw one")
        granted = self.pool.reserve(desk.holder, chain, first, self._clock())
        self._publications.begin(desk.holder, chain, granted)
        room_made = self._it.carry_out(self.pool.take_moves())
        if granted.publication is None and granted.first < len(chain):
            self._count("baton_pool_grants_refused_total")
        return granted, room_made

    async def seal(self, desk: Desk, publication: int, checksums: Sequence[int]) -> Found:
        """Raises ChecksumMismatch if a copy is not whole; its places are free then. Raises Stale if the attachment is
        over by then, and InvalidRequest for what it has not reserved."""
        number = PublicationId(publication)
        blocks = self._writing(desk, publication).blocks
        if len(checksums) != len(blocks):
            raise InvalidRequest(f"publication {publication} has {len(blocks)} blocks, {len(checksums)} checksums came")
        whole = await self._it.store.verified(blocks, checksums)
        if not self.pool.is_live(desk.holder):
            raise Stale(f"{desk.holder} is not attached any more")
        self._writing(desk, publication)  # unless it was sealed or withdrawn meanwhile
        FAILPOINTS.hit("pool.seal.before")
        if not whole:
            self._count("baton_pool_checksum_failures_total")
            self.pool.withdraw(desk.holder, number)
            self._publications.ended(desk.holder, number)
            raise ChecksumMismatch(f"publication {publication}: a copy is not what its checksum says")
        self._it.sealed(blocks, checksums)
        found = self.pool.seal(desk.holder, number, len(blocks), self._clock())
        self._publications.ended(desk.holder, number)
        FAILPOINTS.hit("pool.seal.after")
        return found

    def withdraw(self, desk: Desk, publication: int) -> None:
        """Raises InvalidRequest for what it has not reserved."""
        self._writing(desk, publication)
        self.pool.withdraw(desk.holder, PublicationId(publication))
        self._publications.ended(desk.holder, PublicationId(publication))

    async def close(self) -> None:
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._open is not None:
            await self._open.close()

    # inside

    def _find(self, desk: Desk, asked: Question) -> Found:
        return self.pool.find(desk.holder, asked.chain, asked.most_tokens, self._clock(), partial=asked.partial)

    def _expect(self, desk: Desk, asked: Question, found: Found) -> Arrival | None:
        size = asked.chain.block_size  # of a last block that is wanted in part all of it has to come
        most = min(len(asked.chain), -(-asked.most_tokens // size) if asked.partial else asked.most_tokens // size)
        first, seconds = len(found.blocks), asked.token_seconds
        published = self._publications.expected(desk.holder, asked.chain, first, min(most, len(asked.chain)), seconds)
        if published is not None:
            return published
        return self._it.arrivals.expect(asked.chain, found, most, asked.token_seconds, asked.elsewhere)

    async def _make(self, applicant: Applicant) -> None:
        size, layout = self._size, applicant.layout
        if self._most_tokens is not None:
            size = min(size, self._most_tokens * layout.token_bytes)
        try:
            store = await make(self._folder, size, layout, lambda: not self._closed)
        except ConfigError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        self._open = _Open(applicant, store, self._disk_terms, self._eviction, self._clock)
        self.pool.memory.follow(gained=self._gained, losing=self._losing)
        self._log.info("segment made", segment=store.name, blocks=len(store.rows), block_bytes=self.layout.block_bytes)
        self._opened()

    def _writing(self, desk: Desk, publication: int) -> Publication:
        try:
            return self.pool.writing(desk.holder, PublicationId(publication))
        except KeyError:
            raise InvalidRequest(f"publication {publication} is not one of {desk.holder}'s") from None

    def _prove(self) -> None:
        """Try the byte of everybody who is doubtful, and again after RETRY of those that keep it."""
        if self._closed:
            return
        for holder in self.pool.doubtful:
            if self._it.store.fences.close_off(self._fences[holder]):
                del self._fences[holder]
                self.pool.gone(holder)
                self._log.info("node detached", holder=holder)
        if self.pool.doubtful and self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY, self._prove_again)

    def _prove_again(self) -> None:
        self._retry = None
        self._prove()

    def _gained(self, block: int) -> None:
        self.journal.gained(BlockHash(self.pool.memory.index.name(block)))
        self._count("baton_pool_inserted_blocks_total")
        self._changed()

    def _losing(self, block: int) -> None:
        self.journal.lost(BlockHash(self.pool.memory.index.name(block)))
        self._changed()

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount


def _require_sane(applicant: Applicant) -> None:
    layout = applicant.layout
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
    if layout.dtype not in DTYPE_BYTES or min(sizes) < 1:
        raise LayoutMismatch(f"{layout} is no layout")
    for name in (applicant.node, applicant.process):
        if not name.isprintable():
            raise LayoutMismatch(f"node name {name!r} is not printable")


def _require(field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise LayoutMismatch(f"{field} is {theirs!r}, the pool has {ours!r}")
