"""The pool's disk, as its event loop sees it: what goes there, what comes back, and the account.

    memory evicts a block that was hit -> `carry_out`: copied to a free row at once, written some time
    a look-up goes on where memory ends -> `offer`: read back, if that is quicker than computing

The checksum that a publisher gave stays with its block: in memory, in the journal, and when it is
read back. So nothing is hashed on the way out, and what is wrong on the disk, or was damaged in
memory before, does not come back.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence

from baton.errors import ConfigError, ShuttingDown
from baton.kv.kv_layout import KVLayout
from baton.process import log
from baton.process.clock import Clock
from kv_pool.core.blocks.attachments import Publication
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.disk.journal_records import JournalEntry, make_journal_entry
from kv_pool.core.disk.load_cost import LoadCostModel
from kv_pool.core.disk.slot_ledger import build_slot_ledger
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.core.ledger import PoolLedger
from kv_pool.disk.mount import DiskSettings, MountedDisk, mount_disk
from kv_pool.memory.block_loader import LoadPlan, LoadRequest
from kv_pool.memory.segment_store import SegmentStore

DISK_TIER = "disk"
_MAX_LOAD_BYTES = 64 << 20  # bytes read at once: what has come is found before the rest is
_MAX_DEMOTIONS_PER_GRANT = (
    128  # blocks that one grant may send to disk: some milliseconds of the event loop
)


class DiskTier:
    """Opened in the background: until then, and after a failure, there is no disk."""

    def __init__(
        self,
        terms: DiskSettings,
        eviction: EvictorFactory,
        pool: SharedBlockPool,
        store: SegmentStore,
        digest: str,
        layout: KVLayout,
        clock: Clock,
    ) -> None:
        self._pool, self._store, self._layout, self._clock = pool, store, layout, clock
        self._checksums = array("Q", bytes(8 * pool.memory.num_blocks))  # by block of memory
        self._load_cost = LoadCostModel()
        self._disk: MountedDisk | None = None
        self._failed_disk: MountedDisk | None = None  # it has failed
        self._closing = False
        self._loads: set[_DiskLoad] = set()
        self._copying: asyncio.Future[None] | None = None
        self._counters: dict[str, float] = {}
        self._log = log.get_logger("pool")
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open(terms, eviction, digest))

    def counters(self) -> dict[str, float]:
        disk = self._disk
        told = self._counters | {
            "baton_pool_disk_dropped_blocks_total": float(self._pool.dropped_demotions)
        }
        if disk is None:
            return told
        return told | {
            "baton_pool_disk_slots": float(disk.tier.num_blocks),
            "baton_pool_disk_slots_used": float(len(disk.tier.index)),
            "baton_pool_disk_written_bytes_total": float(
                disk.io_thread.written_blocks * self._layout.block_bytes
            ),
            f'baton_pool_evictions_total{{tier="{DISK_TIER}"}}': float(disk.tier.num_evictions),
        }

    def ledger(self, now: float) -> PoolLedger | None:
        """Of its slots; None if there is no disk."""
        if self._disk is None:
            return None
        loads = {load.last_slot: load.started_at for load in self._loads}
        return build_slot_ledger(self._disk.tier, loads, self._disk.io_thread.unwritten_slots, now)

    async def close(self) -> None:
        """When everything is written."""
        self._closing = True
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._copying is not None:
            await asyncio.wait({self._copying})
        disk = self._disk or self._failed_disk
        if disk is not None:
            await asyncio.to_thread(disk.io_thread.close)

    # from memory

    def on_blocks_sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        """These are in memory now, and are what their publisher says."""
        for block, checksum in zip(blocks, checksums, strict=True):
            self._checksums[block] = checksum

    def stage_demotions(self, moves: Sequence[Demotion]) -> Awaitable[None] | None:
        """Copy what goes to disk before its memory is used for anything else: that is what is to be
        waited for, if anything is being copied."""
        disk = self._disk
        if disk is not None and moves:
            staged = [self._stage_block(disk, move) for move in moves]

            def copy() -> None:
                for memory, row, entry in staged:
                    disk.io_thread.staging.copy_block(row, self._store.rows, memory)
                    disk.io_thread.queue_write(entry, row)

            self._copying = self._store.run_on_verifier(copy)
        if self._copying is None or self._copying.done():
            return None
        return asyncio.shield(self._copying)

    def _stage_block(self, disk: MountedDisk, move: Demotion) -> tuple[int, int, JournalEntry]:
        checksum = disk.checksums[move.disk_slot] = self._checksums[move.memory_block]
        return (
            move.memory_block,
            disk.io_thread.reserve_row(move.disk_slot),
            make_journal_entry(disk.tier, move.disk_slot, checksum),
        )

    # to memory

    def plan_load(self, wanted: LoadRequest, now: float) -> LoadPlan | None:
        disk = self._disk
        if disk is None:
            return None
        slots = self._pool.find_on_disk(wanted.chain, wanted.first_block, wanted.end_block, now)
        if not slots:
            return None
        tokens, size = self._layout.block_size, self._layout.block_bytes
        first, count = wanted.first_block * tokens, len(slots) * tokens
        patience = self._load_cost.max_wait_seconds(
            first, count, len(slots) * size, wanted.compute_seconds_per_token, now
        )
        if patience is None:
            self._count("baton_pool_loads_declined_total")
            return None
        load = _DiskLoad(
            disk,
            wanted.first_block,
            slots[: max(1, _MAX_LOAD_BYTES // size)],
            now,
            ended=self._loads.discard,
        )
        self._loads.add(load)

        async def fetch(publication: Publication) -> Sequence[int]:
            return await self._fetch(load, publication)

        return LoadPlan(
            DISK_TIER, wanted.first_block + len(load.slots), patience, fetch, load.release_slots
        )

    async def _fetch(self, load: "_DiskLoad", publication: Publication) -> Sequence[int]:
        slots = load.slots_for(publication)
        sums = [load.disk.checksums[slot] for slot in slots]
        done = await asyncio.wrap_future(
            load.disk.io_thread.queue_read(slots, sums, publication.blocks)
        )
        size = done.intact_blocks * self._layout.block_bytes
        if done.intact_blocks:
            self._load_cost.rate.record_load(
                size, done.wait_seconds, done.read_seconds, self._clock()
            )
        self._count("baton_pool_disk_read_bytes_total", size)
        self._count("baton_pool_disk_read_seconds_total", done.read_seconds)
        if done.intact_blocks < len(slots) and self._disk is not None:
            self._count("baton_pool_disk_bad_blocks_total")
            load.bad_slot = slots[done.intact_blocks]
        return sums[: done.intact_blocks]

    # the disk itself

    async def _open(self, terms: DiskSettings, eviction: EvictorFactory, digest: str) -> None:
        def failed(error: OSError) -> None:
            self._loop.call_soon_threadsafe(self._on_disk_failed, error)

        try:
            disk = await asyncio.to_thread(
                mount_disk,
                terms,
                eviction,
                digest,
                self._layout,
                self._store.rows,
                self._clock,
                failed,
                lambda: not self._closing,
            )
        except (ConfigError, ShuttingDown) as error:
            self._log.warning("the pool has no disk", reason=error.message)
            return
        self._disk = disk
        self._pool.mount_disk(
            disk.tier, lambda: min(disk.io_thread.num_free_rows, _MAX_DEMOTIONS_PER_GRANT)
        )
        self._log.info(
            "disk ready", slots=disk.tier.num_blocks, used=len(disk.tier.index), fresh=disk.is_new
        )

    def _on_disk_failed(self, error: OSError) -> None:
        """The pool goes on without."""
        self._log.warning("the disk has failed and is not used any more", reason=error.strerror)
        self._pool.mount_disk(None, lambda: 0)
        self._failed_disk, self._disk = self._disk, None

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount


class _DiskLoad:
    """Slots of one prompt, from chain block `first` on, that are being read; their path is pinned.
    `bad_slot`: a slot that is not what it should be, and goes with all behind it."""

    def __init__(
        self,
        disk: MountedDisk,
        first: int,
        slots: "array[int]",
        since: float,
        ended: Callable[["_DiskLoad"], None],
    ) -> None:
        self.disk, self.slots, self.started_at = disk, slots, since
        self.bad_slot: int | None = None
        self._first_block = first
        self._on_released = ended
        disk.tier.pin(self.last_slot)

    @property
    def last_slot(self) -> int:
        return self.slots[-1]

    def slots_for(self, publication: Publication) -> "array[int]":
        """The slots that fill the publication's blocks."""
        start = publication.first_block - self._first_block
        return self.slots[start : start + len(publication.blocks)]

    def release_slots(self) -> None:
        self.disk.tier.unpin(self.last_slot)
        if self.bad_slot is not None:
            self.disk.tier.remove_subtree(self.bad_slot)
        self._on_released(self)
