"""The addresses of a node that shares its host's pool: its own arena, and room for the pool's segment beside it."""

from pathlib import Path

from baton.addressing import AddressSpace
from baton.config import Config
from baton.segment import Segment
from baton.types import BlockIndex
from node_engine.core.step import Engine
from node_engine.host.block_copies import BlockCopies
from node_engine.pool_port import PoolParts


class SharedMemory:
    """`reach` is the whole range: block 0 of it is the arena's. `copy_seconds` is what copying a block takes."""

    def __init__(self, folder: Path, block_bytes: int, arena: Segment) -> None:
        """The arena is mapped once more, and is empty still: it is copied in to measure how long that takes."""
        self._space = AddressSpace(block_bytes, folder)
        self._own = self._space.attach(arena.name)
        self.reach = self._space.view()
        self.copies = BlockCopies(self.reach, block_bytes)
        self.copy_seconds = self.copies.measure(BlockIndex(0), BlockIndex(1))

    def parts_for(self, config: Config, name: str, host_id: str, engine: Engine) -> PoolParts:
        return PoolParts(config, name, host_id, engine.model_digest, engine.layout, self._space, self._own)
