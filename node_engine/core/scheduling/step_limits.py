"""How much a node computes at once: what the settings say, or what its role and device suggest.

On CPUs, `with_measured_chunk` shortens the chunks of prompts to what the machine needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from baton.config.node_config import NodeConfig
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.step_measurement import MeasuredStep, choose_chunk_tokens

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step."""

    max_num_seqs: int  # sequences that compute or await KV
    max_batched_tokens: int  # tokens of a step
    # Of a step with running sequences, which a prompt chunk may not make longer; None: no bound.
    max_step_seconds: float | None = None
    max_draft_tokens: int = 0  # of a sequence in a step; 0: no speculative decoding


def resolve_step_limits(config: NodeConfig, defaults: StepLimits) -> StepLimits:
    """The limits that `config` sets; a limit that it leaves at auto is that of `defaults`.

    A step must have room for one token of each sequence and one block of a prompt. If only one of
    the limits is set, the other one is adapted to it. Raises ConfigError if that is not possible.
    """
    sequences = defaults.max_num_seqs if config.max_num_seqs == "auto" else config.max_num_seqs
    if config.max_batched_tokens == "auto":
        tokens = max(defaults.max_batched_tokens, sequences - 1 + config.block_size)
    else:
        tokens = config.max_batched_tokens
        if config.max_num_seqs == "auto":
            sequences = max(1, min(sequences, tokens + 1 - config.block_size))
    SchedulerLimits(sequences, tokens, max_model_len=1).check(config.block_size)
    draft_tokens = 0 if config.speculative == "none" else config.speculative_tokens
    return StepLimits(sequences, tokens, _resolve_step_seconds(config, defaults), draft_tokens)


def _resolve_step_seconds(config: NodeConfig, defaults: StepLimits) -> float | None:
    if config.max_step_ms == "auto":
        return defaults.max_step_seconds
    return config.max_step_ms / 1e3 or None


def with_measured_chunk(
    config: NodeConfig, limits: StepLimits, measured: Sequence[MeasuredStep]
) -> StepLimits:
    """These limits, with steps no longer than prompts need to be computed at nearly the best rate.

    Unchanged if the settings name a number of tokens, or nothing was measured.
    """
    chunk = choose_chunk_tokens(measured)
    if config.max_batched_tokens != "auto" or chunk is None:
        return limits
    least = limits.max_num_seqs - 1 + config.block_size
    tokens = min(limits.max_batched_tokens, max(chunk, least))
    return replace(limits, max_batched_tokens=tokens)
