"""The pool's disk, as its event loop sees it: what goes there, what comes back, and the account.

    memory evicts a block that was hit -> `carry_out`: copied to a free row at once, written some time
    a look-up goes on where memory ends -> `offer`: read back, if that is quicker than computing

The checksum that a publisher gave stays with its block: in memory, in the journal, and when it is read back. So nothing
is hashed on the way out, and what is wrong on the disk, or was damaged in memory before, does not come back.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence

from baton import log
from baton.clock import Clock
from baton.errors import ConfigError, Draining
from baton.kv_layout import KVLayout
from kv_pool.arrivals import Offer, Wanted
from kv_pool.core.disk import Move
from kv_pool.core.disk_journal import Entry, entry_of
from kv_pool.core.holders import Publication
from kv_pool.core.ledger import PoolLedger
from kv_pool.core.load_worth import LoadWorth
from kv_pool.core.policies import Eviction
from kv_pool.core.pool import Pool
from kv_pool.core.slot_ledger import slot_ledger
from kv_pool.disk_mount import Disk, DiskTerms, mount
from kv_pool.store import Store

TIER = "disk"
_PIECE = 64 << 20  # bytes read at once: what has come is found before the rest is
_MOVES = 128  # blocks that one grant may send to disk: some milliseconds of the event loop


class DiskTier:
    """Opened in the background: until then, and after a failure, there is no disk."""

    def __init__(
        self,
        terms: DiskTerms,
        eviction: Eviction,
        pool: Pool,
        store: Store,
        digest: str,
        layout: KVLayout,
        clock: Clock,
    ) -> None:
        self._pool, self._store, self._layout, self._clock = pool, store, layout, clock
        self._sums = array("Q", bytes(8 * pool.memory.total))  # by block of memory
        self._worth = LoadWorth()
        self._disk: Disk | None = None
        self._ended: Disk | None = None  # it has failed
        self._closing = False
        self._loads: set[_Load] = set()
        self._copying: asyncio.Future[None] | None = None
        self._counters: dict[str, float] = {}
        self._log = log.get("pool")
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open(terms, eviction, digest))

    def counters(self) -> dict[str, float]:
        disk = self._disk
        told = self._counters | {"baton_pool_disk_dropped_blocks_total": float(self._pool.not_moved)}
        if disk is None:
            return told
        return told | {
            "baton_pool_disk_slots": float(disk.tier.total),
            "baton_pool_disk_slots_used": float(len(disk.tier.index)),
            "baton_pool_disk_written_bytes_total": float(disk.thread.written * self._layout.block_bytes),
            f'baton_pool_evictions_total{{tier="{TIER}"}}': float(disk.tier.evictions),
        }

    def ledger(self, now: float) -> PoolLedger | None:
        """Of its slots; None if there is no disk."""
        if self._disk is None:
            return None
        loads = {load.last: load.since for load in self._loads}
        return slot_ledger(self._disk.tier, loads, self._disk.thread.writing, now)

    async def close(self) -> None:
        """When everything is written."""
        self._closing = True
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._copying is not None:
            await asyncio.wait({self._copying})
        disk = self._disk or self._ended
        if disk is not None:
            await asyncio.to_thread(disk.thread.close)

    # from memory

    def sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        """These are in memory now, and are what their publisher says."""
        for block, checksum in zip(blocks, checksums, strict=True):
            self._sums[block] = checksum

    def carry_out(self, moves: Sequence[Move]) -> Awaitable[None] | None:
        """Copy what goes to disk before its memory is used for anything else: that is what is to be waited for, if
        anything is being copied."""
        disk = self._disk
        if disk is not None and moves:
            staged = [self._stage(disk, move) for move in moves]

            def copy() -> None:
                for memory, row, entry in staged:
                    disk.thread.staging.copy(row, self._store.rows, memory)
                    disk.thread.write(entry, row)

            self._copying = self._store.soon(copy)
        if self._copying is None or self._copying.done():
            return None
        return asyncio.shield(self._copying)

    def _stage(self, disk: Disk, move: Move) -> tuple[int, int, Entry]:
        checksum = disk.sums[move.disk] = self._sums[move.memory]
        return move.memory, disk.thread.take_row(move.disk), entry_of(disk.tier, move.disk, checksum)

    # to memory

    def offer(self, wanted: Wanted, now: float) -> Offer | None:
        disk = self._disk
        if disk is None:
            return None
        slots = self._pool.on_disk(wanted.chain, wanted.first, wanted.end, now)
        if not slots:
            return None
        tokens, size = self._layout.block_size, self._layout.block_bytes
        first, count = wanted.first * tokens, len(slots) * tokens
        patience = self._worth.patience(first, count, len(slots) * size, wanted.token_seconds, now)
        if patience is None:
            self._count("baton_pool_loads_declined_total")
            return None
        load = _Load(disk, wanted.first, slots[: max(1, _PIECE // size)], now, ended=self._loads.discard)
        self._loads.add(load)

        async def fetch(publication: Publication) -> Sequence[int]:
            return await self._fetch(load, publication)

        return Offer(TIER, wanted.first + len(load.slots), patience, fetch, load.let_go)

    async def _fetch(self, load: "_Load", publication: Publication) -> Sequence[int]:
        slots = load.places_of(publication)
        sums = [load.disk.sums[slot] for slot in slots]
        done = await asyncio.wrap_future(load.disk.thread.read(slots, sums, publication.blocks))
        size = done.whole * self._layout.block_bytes
        if done.whole:
            self._worth.rate.measured(size, done.waited, done.took, self._clock())
        self._count("baton_pool_disk_read_bytes_total", size)
        self._count("baton_pool_disk_read_seconds_total", done.took)
        if done.whole < len(slots) and self._disk is not None:
            self._count("baton_pool_disk_bad_blocks_total")
            load.bad = slots[done.whole]
        return sums[: done.whole]

    # the disk itself

    async def _open(self, terms: DiskTerms, eviction: Eviction, digest: str) -> None:
        def failed(error: OSError) -> None:
            self._loop.call_soon_threadsafe(self._failed, error)

        try:
            disk = await asyncio.to_thread(
                mount,
                terms,
                eviction,
                digest,
                self._layout,
                self._store.rows,
                self._clock,
                failed,
                lambda: not self._closing,
            )
        except (ConfigError, Draining) as error:
            self._log.warning("the pool has no disk", reason=error.message)
            return
        self._disk = disk
        self._pool.mount(disk.tier, lambda: min(disk.thread.room, _MOVES))
        self._log.info("disk ready", slots=disk.tier.total, used=len(disk.tier.index), fresh=disk.fresh)

    def _failed(self, error: OSError) -> None:
        """The pool goes on without."""
        self._log.warning("the disk has failed and is not used any more", reason=error.strerror)
        self._pool.mount(None, lambda: 0)
        self._ended, self._disk = self._disk, None

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount


class _Load:
    """Slots of one prompt, from chain block `first` on, that are being read; their path is pinned. `bad`: a slot that
    is not what it should be, and goes with all behind it."""

    def __init__(
        self, disk: Disk, first: int, slots: "array[int]", since: float, ended: Callable[["_Load"], None]
    ) -> None:
        self.disk, self.slots, self.since = disk, slots, since
        self.bad: int | None = None
        self._first = first
        self._ended = ended
        disk.tier.pin(self.last)

    @property
    def last(self) -> int:
        return self.slots[-1]

    def places_of(self, publication: Publication) -> "array[int]":
        """The slots that fill the publication's blocks."""
        start = publication.first - self._first
        return self.slots[start : start + len(publication.blocks)]

    def let_go(self) -> None:
        self.disk.tier.unpin(self.last)
        if self.bad is not None:
            self.disk.tier.drop_branch(self.bad)
        self._ended(self)
