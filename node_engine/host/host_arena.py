"""The KV cache of a node in host memory: a shared-memory segment, sized by --kv-memory.

Peers of this host write to the segment and read from it. A node that uses its host's shared pool
maps the segment a second time, at the beginning of an address range in which the pool's segment is
mapped later: block tables may then contain blocks of both.
"""

from pathlib import Path

from baton.config.memory_size import AUTO, resolve_memory_size
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.process import log
from baton.shared_memory import segment as segments
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from baton.shared_memory.segment import Segment
from node_engine.core.scheduling.kv_cache_manager import CopyBlocks
from node_engine.core.step.engine import Engine
from node_engine.shared_pool.pool_client import NodeAddressSpace


class HostArena:
    """Owns the memory of a node's KV blocks until it is closed."""

    def __init__(
        self, segment: Segment, num_blocks: int, engine: Engine, pool_space: NodeAddressSpace | None
    ) -> None:
        """`pool_space` begins with the arena and has room for the shared pool; None: no pool."""
        self.segment = segment
        self.num_blocks = num_blocks
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
        self.segment.close()


def create_host_arena(config: NodeConfig, engine: Engine) -> HostArena:
    """Create the segment of a node and map it. Takes seconds; the caller closes the arena.

    Raises ConfigError if --kv-memory is too small or not available.
    """
    folder, block_bytes = Path(config.segment_dir), engine.layout.block_bytes
    num_blocks = compute_cache_blocks(
        config, block_bytes, engine.max_model_len, engine.cache_limits.device_bytes
    )
    size = segments.round_up_segment_bytes(num_blocks * block_bytes, block_bytes)
    segment = segments.create_segment(folder, "arena", size)
    try:
        pool_space = NodeAddressSpace(folder, block_bytes, segment) if config.pool else None
        return HostArena(segment, size // block_bytes, engine, pool_space)
    except BaseException:
        segment.close()
        raise


def compute_cache_bytes(config: NodeConfig) -> int:
    """Bytes of --kv-memory. Raises ConfigError if there is less memory available."""
    folder = Path(config.segment_dir)
    try:
        room = measure_available_memory(folder)
        reserved = segments.unfilled_bytes(folder)  # of segments that are not filled yet
    except OSError as error:
        raise ConfigError(
            f"segment_dir {config.segment_dir!r} cannot be used ({error.strerror}):"
            " give --segment-dir a folder"
        ) from None
    memory = resolve_memory_size(config.kv_memory, room)
    if config.kv_memory == AUTO:
        memory = min(memory, max(0, room.usable_bytes - reserved))
    if memory > room.usable_bytes - reserved:
        raise insufficient_memory_error(folder, memory, room, "--kv-memory", reserved)
    return memory


def compute_cache_blocks(
    config: NodeConfig, block_bytes: int, max_model_len: int, device_bytes: int | None = None
) -> int:
    """Number of KV blocks that fit in --kv-memory, and in `device_bytes` of an engine's device.

    With `auto`, at most as many as --max-num-seqs sequences of full length need. Raises ConfigError
    if the memory is too small or not available.
    """
    memory = compute_cache_bytes(config)
    if device_bytes is not None and memory > device_bytes:
        if config.kv_memory != AUTO:
            raise ConfigError(
                f"kv_memory {config.kv_memory!r} is {memory} bytes: the GPU has room for"
                f" {device_bytes} after the model's weights: lower --kv-memory, or leave it at auto"
            )
        memory = device_bytes
    blocks = memory // block_bytes
    if config.kv_memory == AUTO:
        blocks = min(blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    if blocks < 4:
        raise ConfigError(
            f"kv_memory {config.kv_memory!r} holds {blocks} blocks of {block_bytes} bytes:"
            " give it more"
        )
    log.get_logger("engine").info("kv cache size chosen", bytes=blocks * block_bytes, blocks=blocks)
    return blocks
