"""The bounds of a step: those that are set, and the defaults of a role and a device."""

from dataclasses import replace
from typing import Any

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.limits import MAX_AUTO_NUM_SEQS
from decode_node.default_limits import DECODE_LIMITS
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.step_limits import (
    StepLimits,
    resolve_step_limits,
    with_measured_chunk,
)
from node_engine.core.scheduling.step_measurement import MeasuredStep
from node_engine.core.step.step_batch import SequenceId, SequenceSlice, StepBatch
from prefill_node.default_limits import PREFILL_LIMITS

DEFAULTS = StepLimits(max_num_seqs=64, max_batched_tokens=512, max_step_seconds=0.25)


@pytest.mark.parametrize(
    ("settings", "sequences", "tokens"),
    [
        ({}, 64, 512),
        ({"max_num_seqs": 8}, 8, 512),
        ({"max_batched_tokens": 4096}, 64, 4096),
        ({"max_num_seqs": 300, "max_batched_tokens": 1000}, 300, 1000),
        # The other one is adapted: every sequence gets a token, and one block is computed.
        ({"max_num_seqs": 600}, 600, 615),
        ({"max_batched_tokens": 40}, 25, 40),
        ({"max_batched_tokens": 32, "block_size": 32}, 1, 32),
    ],
)
def test_settings_override_defaults(settings: dict[str, Any], sequences: int, tokens: int) -> None:
    assert resolve_step_limits(Config(**settings), DEFAULTS) == StepLimits(sequences, tokens, 0.25)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 64, "max_batched_tokens": 32},
        {"max_batched_tokens": 16, "block_size": 32},
    ],
)
def test_limits_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="raise --max-batched-tokens or lower --max-num-seqs"):
        resolve_step_limits(Config(**settings), DEFAULTS)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_adapted_limits_are_accepted_by_the_scheduler(block_size: int) -> None:
    for settings in ({"max_num_seqs": 600}, {"max_batched_tokens": 300}):
        config = Config(block_size=block_size, **settings)  # type: ignore[arg-type]
        limits = resolve_step_limits(config, DEFAULTS)
        SchedulerLimits(limits.max_num_seqs, limits.max_batched_tokens, 64).check(block_size)


def test_defaults_of_each_role_and_device() -> None:
    """CPUs as before GPUs were served; a GPU computes larger chunks, most in a prefill node."""
    assert PREFILL_LIMITS["cpu"] == DECODE_LIMITS["cpu"] == DEFAULTS
    prefill, decode = PREFILL_LIMITS["cuda"], DECODE_LIMITS["cuda"]
    assert prefill.max_batched_tokens > decode.max_batched_tokens > 512
    every = [*PREFILL_LIMITS.values(), *DECODE_LIMITS.values()]
    assert max(limits.max_num_seqs for limits in every) == MAX_AUTO_NUM_SEQS
    for limits in every:
        SchedulerLimits(limits.max_num_seqs, limits.max_batched_tokens, 64).check(256)


@pytest.mark.parametrize(("max_step_ms", "seconds"), [("auto", 0.25), (0, None), (40, 0.04)])
def test_bound_of_a_step(max_step_ms: Any, seconds: float | None) -> None:
    limits = resolve_step_limits(Config(max_step_ms=max_step_ms), DEFAULTS)
    assert limits.max_step_seconds == seconds


def measured_step(tokens: int, tokens_per_second: float) -> MeasuredStep:
    batch = StepBatch((SequenceSlice(SequenceId(0), (0,) * tokens, 0, (), None),))
    return MeasuredStep(batch, tokens / tokens_per_second)


@pytest.mark.parametrize(
    ("settings", "rates", "tokens"),
    [
        ({}, {64: 300, 128: 390, 256: 400, 512: 400}, 128),
        ({}, {64: 100, 128: 200, 256: 300, 512: 400}, 512),
        ({}, {64: 400, 128: 400}, 79),  # a token of each sequence, and a block
        ({"max_num_seqs": 8}, {64: 400, 128: 400}, 64),
        ({"max_batched_tokens": 400}, {64: 400, 128: 400}, 400),
        ({}, {}, 512),
    ],
)
def test_chunk_follows_from_measured_rates(
    settings: dict[str, Any], rates: dict[int, float], tokens: int
) -> None:
    config = Config(**settings)
    limits = resolve_step_limits(config, DEFAULTS)
    measured = [measured_step(1, 10.0), *(measured_step(*rate) for rate in rates.items())]
    chosen = with_measured_chunk(config, limits, measured if rates else [])
    assert chosen == replace(limits, max_batched_tokens=tokens)
