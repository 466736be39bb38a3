"""The KV cache of a node in host memory: a shared-memory segment, sized by --kv-memory.

Peers of this host write to the segment and read from it. A node that uses its host's shared pool
maps the segment a second time, at the beginning of an address range in which the pool's segment is
mapped later: block tables may then contain blocks of both.
"""

import dataclasses
from pathlib import Path

from baton.config.memory_size import AUTO, parse_memory_size, resolve_memory_size
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.process import log
from baton.shared_memory import segment as segments
from baton.shared_memory.available_memory import (
    AvailableMemory,
    format_size,
    insufficient_memory_error,
    measure_available_memory,
)
from baton.shared_memory.segment import Segment
from node_engine.core.scheduling.kv_cache_manager import CopyBlocks
from node_engine.core.scheduling.step_limits import DeviceType, StepLimits
from node_engine.core.step.device_memory import DeviceMemoryProfile, compute_device_cache_bytes
from node_engine.core.step.engine import Engine
from node_engine.host.cache_memory import CacheMemory
from node_engine.shared_pool.pool_client import NodeAddressSpace

_MIN_BLOCKS = 4  # of a cache that can serve anything
_INITIAL_BLOCKS = 64  # allocated before the node serves; the steps of a warm-up use fewer


class HostArena:
    """Owns the memory of a node's KV blocks until it is closed."""

    def __init__(
        self, segment: Segment, num_blocks: int, engine: Engine, pool_space: NodeAddressSpace | None
    ) -> None:
        """`pool_space` begins with the arena and has room for the shared pool; None: no pool."""
        self.segment = segment
        self.num_blocks = num_blocks
        self.memory = CacheMemory(segment, engine.layout.block_bytes)
        self.pool_space = pool_space
        self.reads_pool_in_place = pool_space is None or engine.cache_limits.reads_pool_in_place
        # All blocks that a block table may contain, the arena's first.
        self.block_memory = pool_space.block_memory if pool_space else segment.view
        # Of these, what the engine computes with.
        self.engine_memory = self.block_memory if self.reads_pool_in_place else segment.view

    @property
    def pool_block_copier(self) -> CopyBlocks | None:
        """Copies blocks of the shared pool into the arena; None if they are read in place."""
        if self.pool_space is None or self.reads_pool_in_place:
            return None
        return self.pool_space.block_copier.copy_blocks

    @property
    def seconds_per_block_copy(self) -> float:
        return self.pool_space.seconds_per_block_copy if self.pool_space else 0.0

    def close(self) -> None:
        """Remove the segment's file. Its memory is unmapped when the engine is deleted as well."""
        self.memory.stop_allocation()
        self.segment.close()
        self.block_memory = self.engine_memory = memoryview(b"")


def create_host_arena(
    config: NodeConfig,
    engine: Engine,
    limits: StepLimits,
    device_memory: DeviceMemoryProfile | None = None,
) -> HostArena:
    """Create the segment of a node and map it; the caller closes the arena.

    `device_memory` is that of the engine's GPU, which pins the whole arena; this takes seconds.
    None if the engine computes in the arena itself, which then has memory for its first blocks:
    `HostArena.memory` allocates the rest. Raises ConfigError if --kv-memory is too small or not
    available.
    """
    folder, block_bytes = Path(config.segment_dir), engine.layout.block_bytes
    sequences = limits.max_num_seqs * engine.layout.count_blocks(engine.max_model_len)
    num_blocks = compute_cache_blocks(config, block_bytes, sequences, device_memory)
    size = segments.round_up_segment_bytes(num_blocks * block_bytes, block_bytes)
    initial = size if device_memory else _INITIAL_BLOCKS * block_bytes
    segment = segments.create_segment(folder, "arena", size, initial_bytes=initial)
    try:
        pool_space = NodeAddressSpace(folder, block_bytes, segment) if config.pool else None
        return HostArena(segment, size // block_bytes, engine, pool_space)
    except BaseException:
        segment.close()
        raise


def require_cache_memory(config: NodeConfig, device: DeviceType) -> None:
    """Raise ConfigError if the size of --kv-memory is malformed or not available on this host.

    Shares of a GPU's memory are not known before the model is loaded.
    """
    room, promised = _measure_host_memory(config)
    if device == "cpu":
        _choose_host_bytes(config, room, promised)
    else:
        _require_host_memory(config, parse_memory_size(config.kv_memory, 0), room, promised)


def compute_cache_blocks(
    config: NodeConfig,
    block_bytes: int,
    max_useful_blocks: int,
    device_memory: DeviceMemoryProfile | None = None,
) -> int:
    """Number of KV blocks that fit in --kv-memory, on a GPU in `device_memory`.

    `max_useful_blocks` is what --max-num-seqs sequences of full length need: `auto` takes no more.
    Raises ConfigError if the memory is too small or not available.
    """
    room, promised = _measure_host_memory(config)
    if device_memory is None:
        memory = _choose_host_bytes(config, room, promised)
    else:
        memory = _choose_device_bytes(config, device_memory, room, promised)
    blocks = memory // block_bytes
    if config.kv_memory == AUTO:
        blocks = min(blocks, max_useful_blocks)
    if blocks < _MIN_BLOCKS:
        figures = ""
        if device_memory is not None:
            usable = format_size(max(0, room.usable_bytes - promised))
            figures = f" ({device_memory.describe()}; the host has {usable} for its copy)"
        raise ConfigError(
            f"kv_memory {config.kv_memory!r} holds {blocks} blocks of {block_bytes} bytes"
            f"{figures}: give it more",
            param="kv_memory",
        )
    measured = {} if device_memory is None else dataclasses.asdict(device_memory)
    log.get_logger("engine").info(
        "kv cache size chosen", bytes=blocks * block_bytes, blocks=blocks, **measured
    )
    return blocks


def _measure_host_memory(config: NodeConfig) -> tuple[AvailableMemory, int]:
    """What is available for segments, and how much of it is promised to segments being filled."""
    folder = Path(config.segment_dir)
    try:
        return measure_available_memory(folder), segments.unfilled_bytes(folder)
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}):"
            " give --segment-dir a folder"
        ) from None


def _choose_host_bytes(config: NodeConfig, room: AvailableMemory, promised: int) -> int:
    """Bytes of --kv-memory where the engine computes in host memory."""
    memory = resolve_memory_size(config.kv_memory, room)
    if config.kv_memory == AUTO:
        memory = min(memory, max(0, room.usable_bytes - promised))
    return _require_host_memory(config, memory, room, promised)


def _choose_device_bytes(
    config: NodeConfig, device_memory: DeviceMemoryProfile, room: AvailableMemory, promised: int
) -> int:
    """Bytes of --kv-memory on a GPU; the host has a copy of the same size."""
    memory = compute_device_cache_bytes(
        config.kv_memory,
        device_memory,
        config.nodes_per_gpu,
        max(0, room.usable_bytes - promised),
        config.nodes_per_host,
    )
    return _require_host_memory(config, memory, room, promised)


def _require_host_memory(
    config: NodeConfig, memory: int, room: AvailableMemory, promised: int
) -> int:
    if memory > room.usable_bytes - promised:
        folder = Path(config.segment_dir)
        raise insufficient_memory_error(folder, memory, room, "--kv-memory", promised)
    return memory
