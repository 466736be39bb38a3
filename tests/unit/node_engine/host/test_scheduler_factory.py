"""What the scheduler of a node learns from the steps that were measured at its start."""

from pathlib import Path
from typing import Literal

import pytest

from baton.config.node_config import NodeConfig
from baton.types import BlockIndex, SamplingParams
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.scheduling.step_measurement import MeasuredStep
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.host.engine_factory import build_engine
from node_engine.host.host_arena import create_host_arena
from node_engine.host.scheduler_factory import make_scheduler

Speculation = Literal["none", "ngram", "draft"]
SPEC = SampleSpec(SamplingParams(1, temperature=0.0), 0, position=1)


def make_step(num_tokens: int, seconds: float) -> MeasuredStep:
    slice_ = SequenceSlice(SequenceId(0), (0,) * num_tokens, 0, [BlockIndex(0)], SPEC)
    return MeasuredStep(StepBatch((slice_,)), seconds)


MEASURED = [make_step(1, 0.03), make_step(1, 0.03), make_step(64, 0.128), make_step(128, 0.256)]


def build_scheduler(
    folder: Path, measured: list[MeasuredStep], speculative: Speculation
) -> Scheduler:
    config = NodeConfig(
        engine="paced", speculative=speculative, segment_dir=str(folder), kv_memory="1MiB"
    )
    limits = StepLimits(4, 256, max_draft_tokens=4 if speculative != "none" else 0)
    engine = build_engine(config, "cpu", limits)
    arena = create_host_arena(config, engine, limits)
    try:
        return make_scheduler(config, limits, measured, engine, arena, None)
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("measured", "speculative", "ridge_tokens"),
    [(MEASURED, "none", 15), (MEASURED, "ngram", 0), ([], "none", 0)],
)
def test_prompts_are_spread_where_steps_were_measured_and_nothing_is_drafted(
    tmp_path: Path, measured: list[MeasuredStep], speculative: Speculation, ridge_tokens: int
) -> None:
    scheduler = build_scheduler(tmp_path, measured, speculative)
    assert scheduler.speculator.is_enabled == (speculative != "none")
    assert scheduler.prefill_budget.ridge_tokens == pytest.approx(ridge_tokens, abs=1)
