"""Measures an engine at start, and chooses the limits of steps that follow from it."""

from collections.abc import Sequence

from baton.config.node_config import NodeConfig
from baton.process import log
from baton.process.clock import Clock, monotonic_clock
from node_engine.core.scheduling.step_limits import DeviceType, StepLimits, with_measured_chunk
from node_engine.core.scheduling.step_measurement import MeasuredStep, measure_steps
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import StepBatch


def measure_engine(
    engine: Engine,
    num_blocks: int,
    limits: StepLimits,
    device: DeviceType,
    clock: Clock = monotonic_clock,
) -> list[MeasuredStep]:
    """Time a few steps of a model on a CPU, in its empty cache, after its warm-up.

    Nothing is measured on a GPU, whose limits are constants, or without a model. Raises what
    `Engine.run` raises.
    """
    if device != "cpu" or engine.model_size is None:
        return []

    def time_step(batch: StepBatch) -> float:
        started = clock()
        engine.run(batch)
        return clock() - started

    return measure_steps(
        time_step,
        block_size=engine.layout.block_size,
        num_blocks=num_blocks,
        max_model_len=engine.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
    )


def choose_measured_limits(
    config: NodeConfig, limits: StepLimits, measured: Sequence[MeasuredStep]
) -> StepLimits:
    """The limits of the node's steps, which it logs with the best measured rate of prompts."""
    chosen = with_measured_chunk(config, limits, measured)
    log.get_logger("engine").info(
        "step limits chosen",
        max_num_seqs=chosen.max_num_seqs,
        max_batched_tokens=chosen.max_batched_tokens,
        max_step_seconds=chosen.max_step_seconds,
        measured_tokens_per_second=round(
            max((step.batch.num_tokens / step.seconds for step in measured), default=0.0)
        ),
    )
    return chosen
