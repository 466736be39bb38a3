"""The disk tier on the pool's event loop: demotions, loads and the ledger of the disk.

    Memory evicts a block that was used: `stage_demotions` copies it to a free staging row at once;
    the I/O thread writes it later.
    A look-up continues beyond memory: `plan_load` offers to read the next blocks back, if that is
    faster than computing them.

The checksum that a publisher gave stays with its block in memory, in the journal and when it is
read back. So demotions need no hashing, and a block that was damaged on disk, or in memory before,
is never loaded.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence

from baton.errors import ConfigError, ShuttingDown
from baton.kv.blocks import KVLayout
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
from kv_pool.memory.pending_blocks import LoadPlan, LoadRequest
from kv_pool.memory.segment_store import SegmentStore

DISK_TIER = "disk"
_MAX_LOAD_BYTES = 64 << 20  # per read, so that the first blocks are findable before the rest
_MAX_DEMOTIONS_PER_GRANT = 128  # blocks: planning them takes some milliseconds of the event loop


class DiskTier:
    """The disk of an open pool. It is mounted in the background; after a failure there is none."""

    def __init__(
        self,
        disk_settings: DiskSettings,
        make_evictor: EvictorFactory,
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
        self._failed_disk: MountedDisk | None = None
        self._closing = False
        self._loads: set[_DiskLoad] = set()
        self._copying: asyncio.Future[None] | None = None
        self._counters: dict[str, float] = {}
        self._log = log.get_logger("pool")
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open(disk_settings, make_evictor, digest))

    def counters(self) -> dict[str, float]:
        disk = self._disk
        counters = self._counters | {
            "baton_pool_disk_dropped_blocks_total": float(self._pool.dropped_demotions)
        }
        if disk is None:
            return counters
        return counters | {
            "baton_pool_disk_slots": float(disk.tier.num_blocks),
            "baton_pool_disk_slots_used": float(len(disk.tier.index)),
            "baton_pool_disk_written_bytes_total": float(
                disk.io_thread.written_blocks * self._layout.block_bytes
            ),
            f'baton_pool_evictions_total{{tier="{DISK_TIER}"}}': float(disk.tier.num_evictions),
        }

    def ledger(self, now: float) -> PoolLedger | None:
        """Return the ledger of the slots; None if there is no disk."""
        if self._disk is None:
            return None
        loads = {load.last_slot: load.started_at for load in self._loads}
        return build_slot_ledger(self._disk.tier, loads, self._disk.io_thread.unwritten_slots, now)

    async def close(self) -> None:
        """Close the disk when everything is written."""
        self._closing = True
        await asyncio.gather(self._opening, return_exceptions=True)
        if self._copying is not None:
            await asyncio.wait({self._copying})
        disk = self._disk or self._failed_disk
        if disk is not None:
            await asyncio.to_thread(disk.io_thread.close)

    # from memory

    def on_blocks_sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        """Remember the checksums of blocks that were verified in memory."""
        for block, checksum in zip(blocks, checksums, strict=True):
            self._checksums[block] = checksum

    def stage_demotions(self, demotions: Sequence[Demotion]) -> Awaitable[None] | None:
        """Start copying demoted blocks to staging rows.

        Returns an awaitable that ends when the memory of these and of all earlier ones may be
        reused; None if no copy is running.
        """
        disk = self._disk
        if disk is not None and demotions:
            staged = [self._stage_block(disk, demotion) for demotion in demotions]

            def copy() -> None:
                for memory, row, entry in staged:
                    disk.io_thread.staging.copy_block(row, self._store.rows, memory)
                    disk.io_thread.queue_write(entry, row)

            self._copying = self._store.run_on_verifier(copy)
        if self._copying is None or self._copying.done():
            return None
        return asyncio.shield(self._copying)

    def _stage_block(self, disk: MountedDisk, demotion: Demotion) -> tuple[int, int, JournalEntry]:
        """Reserve a staging row; returns memory block, row and journal entry."""
        slot = demotion.disk_slot
        checksum = disk.checksums[slot] = self._checksums[demotion.memory_block]
        entry = make_journal_entry(disk.tier, slot, checksum)
        return demotion.memory_block, disk.io_thread.reserve_row(slot), entry

    # to memory

    def plan_load(self, load_request: LoadRequest, now: float) -> LoadPlan | None:
        """Offer to read the blocks back; None if they are not on disk or computing is faster."""
        disk, first_block = self._disk, load_request.first_block
        if disk is None:
            return None
        slots = self._pool.find_on_disk(
            load_request.chain, first_block, load_request.end_block, now
        )
        if not slots:
            return None
        block_tokens, block_bytes = self._layout.block_size, self._layout.block_bytes
        max_wait = self._load_cost.max_wait_seconds(
            first_block * block_tokens,
            len(slots) * block_tokens,
            len(slots) * block_bytes,
            load_request.compute_seconds_per_token,
            now,
        )
        if max_wait is None:
            self._count("baton_pool_loads_declined_total")
            return None
        slots = slots[: max(1, _MAX_LOAD_BYTES // block_bytes)]
        load = _DiskLoad(disk, first_block, slots, now, on_released=self._loads.discard)
        self._loads.add(load)

        async def fetch(publication: Publication) -> Sequence[int]:
            return await self._fetch(load, publication)

        end_block = first_block + len(slots)
        return LoadPlan(DISK_TIER, end_block, max_wait, fetch, load.release_slots)

    async def _fetch(self, load: "_DiskLoad", publication: Publication) -> Sequence[int]:
        """Read the slots of a publication's blocks; returns the checksums of the intact ones."""
        slots = load.slots_for(publication)
        checksums = [load.disk.checksums[slot] for slot in slots]
        result = await asyncio.wrap_future(
            load.disk.io_thread.queue_read(slots, checksums, publication.blocks)
        )
        size = result.intact_blocks * self._layout.block_bytes
        if result.intact_blocks:
            self._load_cost.rate.record_load(
                size, result.wait_seconds, result.read_seconds, self._clock()
            )
        self._count("baton_pool_disk_read_bytes_total", size)
        self._count("baton_pool_disk_read_seconds_total", result.read_seconds)
        if result.intact_blocks < len(slots) and self._disk is not None:
            self._count("baton_pool_disk_bad_blocks_total")
            load.bad_slot = slots[result.intact_blocks]
        return checksums[: result.intact_blocks]

    # the disk itself

    async def _open(
        self, disk_settings: DiskSettings, make_evictor: EvictorFactory, digest: str
    ) -> None:
        def on_failed(error: OSError) -> None:
            self._loop.call_soon_threadsafe(self._on_disk_failed, error)

        try:
            disk = await asyncio.to_thread(
                mount_disk,
                disk_settings,
                make_evictor,
                digest,
                self._layout,
                self._store.rows,
                self._clock,
                on_failed,
                lambda: not self._closing,
            )
        except (ConfigError, ShuttingDown) as error:
            self._log.warning("disk tier not mounted", reason=error.message)
            return
        self._disk = disk
        self._pool.mount_disk(
            disk.tier, lambda: min(disk.io_thread.num_free_rows, _MAX_DEMOTIONS_PER_GRANT)
        )
        self._log.info(
            "disk tier ready",
            slots=disk.tier.num_blocks,
            used=len(disk.tier.index),
            is_new=disk.is_new,
        )

    def _on_disk_failed(self, error: OSError) -> None:
        """Go on without a disk."""
        self._log.warning("disk tier failed, continuing without it", reason=error.strerror)
        self._pool.mount_disk(None, lambda: 0)
        self._failed_disk, self._disk = self._disk, None

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount


class _DiskLoad:
    """A load of consecutive blocks of one prompt; their slots are pinned until it ends."""

    def __init__(
        self,
        disk: MountedDisk,
        first_block: int,
        slots: "array[int]",
        started_at: float,
        on_released: Callable[["_DiskLoad"], None],
    ) -> None:
        self.disk, self.slots, self.started_at = disk, slots, started_at
        # A slot that failed its checksum: it is removed in the end, with all blocks after it.
        self.bad_slot: int | None = None
        self._first_block = first_block  # number in the chain of the block in the first slot
        self._on_released = on_released
        disk.tier.pin(self.last_slot)

    @property
    def last_slot(self) -> int:
        return self.slots[-1]

    def slots_for(self, publication: Publication) -> "array[int]":
        """Return the slots that fill the publication's blocks."""
        start = publication.first_block - self._first_block
        return self.slots[start : start + len(publication.blocks)]

    def release_slots(self) -> None:
        self.disk.tier.unpin(self.last_slot)
        if self.bad_slot is not None:
            self.disk.tier.remove_subtree(self.bad_slot)
        self._on_released(self)
