"""How much a node computes at once: what the settings say, or what its role and device suggest."""

from dataclasses import dataclass
from typing import Literal

from baton.config.node_config import NodeConfig
from node_engine.core.scheduling.capacity import SchedulerLimits

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step."""

    max_num_seqs: int  # sequences that compute or await KV
    max_batched_tokens: int  # tokens of a step


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
    return StepLimits(sequences, tokens)
