"""The address range of a node that uses its host's pool: its own arena, then the pool's segment."""

from pathlib import Path

from baton.config.settings import Config
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import Segment
from baton.types import BlockIndex
from node_engine.core.step.step_batch import Engine
from node_engine.shared_pool.block_copier import BlockCopier
from node_engine.shared_pool.pool_client import PoolClientContext


class NodeAddressSpace:
    """Maps the arena at the beginning of a range in which the pool's segment is mapped later."""

    def __init__(self, folder: Path, block_bytes: int, arena: Segment) -> None:
        """Maps the empty arena a second time and copies a block in it to measure the duration."""
        self._address_space = BlockAddressSpace(block_bytes, folder)
        self._own_arena = self._address_space.attach_segment(arena.name)
        self.block_memory = self._address_space.view_range()  # begins with block 0 of the arena
        self.block_copier = BlockCopier(self.block_memory, block_bytes)
        self.seconds_per_block_copy = self.block_copier.measure_copy_seconds(
            BlockIndex(0), BlockIndex(1)
        )

    def build_client_context(
        self, config: Config, name: str, host_id: str, engine: Engine
    ) -> PoolClientContext:
        return PoolClientContext(
            config,
            name,
            host_id,
            engine.model_digest,
            engine.layout,
            self._address_space,
            self._own_arena,
        )
