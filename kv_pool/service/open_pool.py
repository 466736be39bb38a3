"""The parts of a pool that exist once its first client has attached."""

from collections.abc import Awaitable, Sequence

from baton.process.clock import Clock
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.disk.disk_tier import DiskTier
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.block_loader import BlockLoader
from kv_pool.memory.segment_store import SegmentStore
from kv_pool.service.requests import AttachRequest


class OpenPool:
    """The segment with its block pool, disk and loader, for the model of the first client."""

    def __init__(
        self,
        first_client: AttachRequest,
        store: SegmentStore,
        disk_settings: DiskSettings | None,
        make_evictor: EvictorFactory,
        clock: Clock,
    ) -> None:
        self.model_digest, self.layout = first_client.model_digest, first_client.layout
        self.store = store
        num_blocks, block_size = len(store.rows), self.layout.block_size
        evictor = make_evictor(num_blocks, block_size)
        self.block_pool = SharedBlockPool(CacheTier(num_blocks, block_size, evictor))
        self.disk: DiskTier | None = None
        if disk_settings is not None:
            self.disk = DiskTier(
                disk_settings,
                make_evictor,
                self.block_pool,
                store,
                self.model_digest,
                self.layout,
                clock,
            )
        self.loader = BlockLoader(
            self.block_pool,
            clock,
            stage_demotions=self.stage_demotions,
            on_blocks_sealed=self.on_blocks_sealed,
        )
        self.loader.sources += [self.disk] if self.disk else []

    def stage_demotions(self, demotions: Sequence[Demotion]) -> Awaitable[None] | None:
        return self.disk.stage_demotions(demotions) if self.disk else None

    def on_blocks_sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        if self.disk is not None:
            self.disk.on_blocks_sealed(blocks, checksums)

    async def close(self) -> None:
        await self.loader.close()
        if self.disk is not None:
            await self.disk.close()
        self.store.close()
