"""Measures an engine at start, and chooses the limits of steps that follow from it."""

import importlib.metadata
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from baton.config.node_config import NodeConfig
from baton.models.weight_cache import resolve_weight_cache
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from baton.process.cores import count_usable_cores
from baton.shared_memory.segment import compute_host_id
from baton.version import package_version
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.core.blocks.block_pool import BackBlocks
from node_engine.core.scheduling.step_limits import StepLimits, with_measured_chunk
from node_engine.core.scheduling.step_measurement import (
    MeasuredStep,
    measure_steps,
)
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import StepBatch
from node_engine.host.host_arena import HostArena
from node_engine.host.step_times_cache import open_step_times_cache


def measure_limits(
    config: NodeConfig, engine: Engine, arena: HostArena, limits: StepLimits
) -> tuple[list[MeasuredStep], StepLimits]:
    """Measured steps, and the limits of the node's steps that follow from them, which are logged.

    Raises what `Engine.run` raises.
    """
    back_blocks = arena.memory.back_blocks
    measured = measure_engine(config, engine, arena.num_blocks, back_blocks, limits)
    return measured, _choose_measured_limits(config, limits, measured)


def measure_engine(
    config: NodeConfig,
    engine: Engine,
    num_blocks: int,
    back_blocks: BackBlocks,
    limits: StepLimits,
    clock: Clock = monotonic_clock,
) -> list[MeasuredStep]:
    """Time a few steps of a model on a CPU, in its empty cache, after its warm-up.

    The blocks of a step get their memory before it is timed. Without enough memory, only shorter
    steps are measured. Times that an equal engine took within a day are used again; see
    StepTimesCache. Nothing is measured on a GPU, whose limits are constants, or without a model.
    Raises what `Engine.run` raises.
    """
    if engine.compute_device.device != "cpu" or engine.model_size is None:
        return []
    cache = open_step_times_cache(resolve_weight_cache(config), _make_cache_key(config, engine))
    found = [] if cache is None else cache.find_times()
    kept = deque(found)

    def time_step(batch: StepBatch) -> float | None:
        if kept and kept[0][0] == batch.num_tokens:
            return kept.popleft()[1]
        kept.clear()  # of other steps
        needed = engine.layout.count_blocks(batch.num_tokens)
        if back_blocks(needed) < needed:
            return None
        started = clock()
        engine.run(batch)
        return clock() - started

    measured = measure_steps(
        time_step,
        block_size=engine.layout.block_size,
        num_blocks=num_blocks,
        max_model_len=engine.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
    )
    times = [(step.batch.num_tokens, step.seconds) for step in measured]
    if cache is not None and times == found:
        log.get_logger("engine").info("steps were measured at an earlier start", steps=len(times))
    elif cache is not None:
        cache.save_times(times)
    return measured


def _make_cache_key(config: NodeConfig, engine: Engine) -> dict[str, object]:
    return {
        "host": compute_host_id(Path(config.segment_dir)),
        "versions": [package_version(), importlib.metadata.version("torch")],
        "model": engine.model_identity.digest.hex(),
        "engine": type(engine).__name__,
        "kernels": _describe_kernels(config),
        "compact_weights": config.compact_weights,
        "threads": engine.compute_device.threads,
        "cores": sorted(os.sched_getaffinity(0)),
        "usable_cores": count_usable_cores(),
    }


def _describe_kernels(config: NodeConfig) -> str:
    library = load_library(config.cpu_kernels)
    build = library.build_id if isinstance(library, NativeLibrary) else ""
    return f"{library.describe()} {build}"


def _choose_measured_limits(
    config: NodeConfig, limits: StepLimits, measured: Sequence[MeasuredStep]
) -> StepLimits:
    chosen = with_measured_chunk(config, limits, measured)
    log.get_logger("engine").info(
        "step limits chosen",
        max_num_seqs=chosen.max_num_seqs,
        max_batched_tokens=chosen.max_batched_tokens,
        max_step_seconds=chosen.max_step_seconds,
        decode_step_seconds=round(
            min((step.seconds for step in measured if step.batch.num_tokens == 1), default=0.0), 4
        ),
        measured_tokens_per_second=round(
            max((step.batch.num_tokens / step.seconds for step in measured), default=0.0)
        ),
    )
    return chosen
