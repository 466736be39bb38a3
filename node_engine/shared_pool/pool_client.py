"""The protocol of a node's client of its host's shared pool; kv_pool/client has the implementation.

The address range of a node that uses its host's pool: its own arena, then the pool's segment.

Copies whole blocks of the shared pool into the arena, for engines that cannot read in place.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from baton.config.node_config import NodeConfig
from baton.kv.blocks import BlockHash, KVLayout
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest, RemotePrefix
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import Segment
from baton.types import BlockIndex
from node_engine.core.step.engine import Engine


class SharedPoolClient(Protocol):
    """A node's connection to the shared pool.

    All methods but `run` may be called from any thread, return at once, and do not raise when the
    pool fails. Callbacks run on the event loop, in the order of the pool's answers.
    """

    @property
    def is_attached(self) -> bool: ...

    async def run(self) -> None:
        """Stay attached to the pool, reconnecting when necessary, until cancelled."""
        ...

    def find_prefix(
        self,
        root_hash: BlockHash,
        packed_hashes: bytes,
        packed_tokens: bytes,
        max_tokens: int,
        on_done: Callable[[PoolHit], None],
        *,
        token_seconds: float | None = None,
        remote_prefix: RemotePrefix | None = None,
    ) -> None:
        """Find the longest prefix of a chain that the pool has, at most `max_tokens` long.

        `on_done` is called once, within a time limit; a late answer or no pool counts as a miss. If
        the pool is loading more of the prefix, the look-up waits for it while computing it, at
        `token_seconds` per token, would take longer.
        """
        ...

    def release_pin(self, pin: PoolPin) -> None:
        """Release a pin that a look-up or a publication returned; call it once for each pin."""
        ...

    def publish_blocks(self, request: PublishRequest) -> bool:
        """Queue a copy of blocks into the pool. False: refused, its callback will not be called."""
        ...

    def counters(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class PoolClientContext:
    """What a node gives to the factory of its pool client."""

    config: NodeConfig
    name: str
    host_id: str
    model_digest: bytes
    layout: KVLayout
    address_space: BlockAddressSpace  # where the client maps the pool's segment
    own_arena: memoryview  # the node's arena, mapped there already: the source of publications


_TRIALS = 5


class BlockCopier:
    """Copies blocks by global index inside one address range."""

    def __init__(self, block_memory: memoryview, block_bytes: int) -> None:
        """`block_memory` begins with block 0; blocks that are not mapped are never touched."""
        self._blocks = np.frombuffer(block_memory, np.uint8).reshape(-1, block_bytes)

    def copy_blocks(self, pairs: Sequence[tuple[BlockIndex, BlockIndex]]) -> None:
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source]

    def measure_copy_seconds(self, source: BlockIndex, destination: BlockIndex) -> float:
        """Measure the seconds to copy one block: the median of a few trials."""
        durations = []
        for _ in range(_TRIALS):
            started = time.perf_counter()
            self.copy_blocks([(source, destination)])
            durations.append(time.perf_counter() - started)
        return sorted(durations)[_TRIALS // 2]


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
        self, config: NodeConfig, name: str, host_id: str, engine: Engine
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
