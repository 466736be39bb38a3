"""Builds the engine of a node and sizes its KV cache. Imports torch only if a model needs it."""

import os
from dataclasses import replace
from pathlib import Path

from baton.config.memory_size import AUTO, resolve_memory_size
from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.models.file_digests import ModelFileDigests, compute_file_digests
from baton.process import log
from baton.shared_memory.available_memory import insufficient_memory_error, measure_available_memory
from baton.shared_memory.segment import unfilled_bytes
from node_engine.core.step.step_batch import Engine

_PACED_MAX_MODEL_LEN = 8192


def build_engine(config: NodeConfig) -> Engine:
    """Build the engine that `--engine` names; this takes seconds.

    Raises ConfigError for a model that cannot be served.
    """
    if config.engine == "paced":
        from node_engine.paced.paced_engine import PACED_LAYOUT, PacedCosts, PacedEngine

        costs = PacedCosts(
            prefill_us_per_token=config.paced_prefill_us_per_token,
            decode_base_us=config.paced_step_ms * 1e3,
            decode_us_per_sequence=config.paced_sequence_us,
        )
        return PacedEngine(
            costs,
            layout=replace(PACED_LAYOUT, block_size=config.block_size),
            vocab_size=config.paced_vocab_size,
            reread=config.paced_reread,
            max_model_len=config.max_model_len or _PACED_MAX_MODEL_LEN,
        )
    from node_engine.model.model_engine import ModelEngine

    return ModelEngine.load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        max_model_len=config.max_model_len or None,
        threads=count_compute_threads(config),
        load_format=config.load_format,
    )


def load_model_files(config: NodeConfig) -> ModelFileDigests:
    """Digests of the files that the engine was built from. Reads from disk."""
    if config.engine == "paced":
        return ModelFileDigests()
    return compute_file_digests(Path(config.model), dummy=config.load_format == "dummy")


def count_compute_threads(config: NodeConfig) -> int:
    """Threads of the forward pass. `auto`: the cores of this process, less one for the rest."""
    if config.threads == "auto":
        return max(1, len(os.sched_getaffinity(0)) - 1)
    if not config.threads.isdigit() or int(config.threads) < 1:
        raise ConfigError(f"threads is {config.threads!r}: it must be auto or a number from 1")
    return int(config.threads)


def compute_cache_bytes(config: NodeConfig) -> int:
    """Bytes of --kv-memory. Raises ConfigError if there is less memory available."""
    folder = Path(config.segment_dir)
    try:
        room = measure_available_memory(folder)
        reserved = unfilled_bytes(folder)  # of segments that are not filled yet
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


def compute_cache_blocks(config: NodeConfig, block_bytes: int, max_model_len: int) -> int:
    """Number of KV blocks that fit in --kv-memory.

    With `auto`, at most as many as --max-num-seqs sequences of full length need. Raises ConfigError
    if the memory is too small or not available.
    """
    memory = compute_cache_bytes(config)
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
