"""The parts of a pool that exist once its first client has attached.

What clients ask of the pool: requests to attach, and queries for prefixes.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.errors import LayoutMismatch
from baton.kv.blocks import DTYPE_BYTES, BlockHash, KVLayout
from baton.kv.cache_journal import CacheJournal
from baton.kv.pool_types import RemotePrefix
from baton.process.clock import Clock
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.blocks.demotion import Demotion
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.eviction.policies import EvictorFactory
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.core.ledger import PoolLedger
from kv_pool.disk.disk_tier import DiskTier
from kv_pool.disk.mount import DiskSettings
from kv_pool.memory.pending_blocks import BlockLoader, PendingPublications
from kv_pool.memory.segment_store import SegmentStore


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """What a node says of itself when it attaches."""

    protocol_version: int
    node: str  # name of the node
    incarnation: str
    host_id: str
    model_digest: str  # hex
    layout: KVLayout

    def validate(self) -> None:
        """Raise LayoutMismatch for an invalid layout or node name."""
        layout = self.layout
        sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size)
        if layout.dtype not in DTYPE_BYTES or min(sizes) < 1:
            raise LayoutMismatch(f"{layout} is not a valid layout")
        for name in (self.node, self.incarnation):
            if not name.isprintable():
                raise LayoutMismatch(f"node name {name!r} is not printable")


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A look-up of the longest prefix of a prompt that may be read."""

    chain: PromptChain
    max_tokens: int
    wants_partial: bool = True  # also the block that continues the prefix, if it matches partly
    compute_seconds_per_token: float | None = None  # of the node that looks up; None if unknown
    remote_prefix: RemotePrefix | None = None  # another host's pool that may have a longer prefix

    @property
    def max_blocks(self) -> int:
        """How many blocks of the chain are requested, with the last one if a part of it is."""
        size = self.chain.block_size
        blocks = -(-self.max_tokens // size) if self.wants_partial else self.max_tokens // size
        return min(len(self.chain), blocks)


class OpenPool:
    """The segment with its block pool, disk and loader, for the model of the first client."""

    def __init__(
        self,
        first_client: AttachRequest,
        store: SegmentStore,
        disk_settings: DiskSettings | None,
        make_evictor: EvictorFactory,
        clock: Clock,
        cache_journal: CacheJournal,
        on_changed: Callable[[], None],
    ) -> None:
        """`on_changed` is called when blocks were inserted in the index or removed."""
        self.model_digest, self.layout = first_client.model_digest, first_client.layout
        self.store = store
        self.pending_publications = PendingPublications(clock)
        self._clock = clock
        self._cache_journal = cache_journal
        self._on_changed = on_changed
        self._counters: dict[str, float] = {}
        num_blocks, block_size = len(store.rows), self.layout.block_size
        evictor = make_evictor(num_blocks, block_size)
        self.block_pool = SharedBlockPool(CacheTier(num_blocks, block_size, evictor))
        self.disk = self._make_disk(disk_settings, make_evictor) if disk_settings else None
        self.loader = BlockLoader(
            self.block_pool,
            clock,
            stage_demotions=self.stage_demotions,
            on_blocks_sealed=self.on_blocks_sealed,
        )
        self.loader.sources += [self.disk] if self.disk else []
        self.block_pool.memory.add_listeners(
            on_insert=self._on_block_inserted, on_remove=self._on_block_removed
        )

    def _make_disk(self, disk_settings: DiskSettings, make_evictor: EvictorFactory) -> DiskTier:
        return DiskTier(
            disk_settings,
            make_evictor,
            self.block_pool,
            self.store,
            self.model_digest,
            self.layout,
            self._clock,
        )

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def collect_counters(self) -> dict[str, float]:
        """Return counters and gauges by metric."""
        memory = self.block_pool.memory
        gauges = {
            'baton_pool_evictions_total{tier="memory"}': float(memory.num_evictions),
            "baton_pool_bytes": float(len(memory.index) * self.layout.block_bytes),
            "baton_pool_pins": float(self.block_pool.attachments.num_pins),
        }
        disk = self.disk.counters() if self.disk else {}
        return self._counters | self.loader.counters | gauges | disk

    def disk_ledger(self) -> PoolLedger | None:
        """Return the ledger of the disk's slots, if there is a disk."""
        return self.disk.ledger(self._clock()) if self.disk else None

    def list_block_hashes(self, first: int, last: int) -> Iterator[BlockHash]:
        """Return the hashes of those of the blocks `first` to `last` that are in the index."""
        index = self.block_pool.memory.index
        last = min(last, self.block_pool.memory.num_blocks)
        return (
            BlockHash(index.block_hash(block)) for block in range(first, last) if block in index
        )

    def stage_demotions(self, demotions: Sequence[Demotion]) -> Awaitable[None] | None:
        return self.disk.stage_demotions(demotions) if self.disk else None

    def on_blocks_sealed(self, blocks: Sequence[int], checksums: Sequence[int]) -> None:
        if self.disk is not None:
            self.disk.on_blocks_sealed(blocks, checksums)

    def _on_block_inserted(self, block: int) -> None:
        self._cache_journal.record_insertion(
            BlockHash(self.block_pool.memory.index.block_hash(block))
        )
        self.count("baton_pool_inserted_blocks_total")
        self._on_changed()

    def _on_block_removed(self, block: int) -> None:
        self._cache_journal.record_eviction(
            BlockHash(self.block_pool.memory.index.block_hash(block))
        )
        self._on_changed()

    async def close(self) -> None:
        await self.loader.close()
        if self.disk is not None:
            await self.disk.close()
        self.store.close()
