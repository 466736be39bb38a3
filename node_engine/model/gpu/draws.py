"""Reads the tokens that a step has drawn on the device."""

import torch

from baton.errors import NodeFailed
from node_engine.core.step.step_batch import SliceResult
from node_engine.model.gpu.step_inputs import StepInputs
from node_engine.model.sampling.sampler import needs_extra_steps, sample_tokens


def read_draws(
    inputs: StepInputs,
    logits: torch.Tensor,  # [draws, vocab]
    tokens: list[int],  # one per draw, or more
) -> list[SliceResult]:
    """The result of each draw. Rows with penalties, bias or logprobs are sampled by the host.

    Raises NodeFailed if logits are not finite.
    """
    specs = inputs.sample_specs
    drawn = [SliceResult(require_finite(token)) for token in tokens[: len(specs)]]
    special = [row for row, spec in enumerate(specs) if needs_extra_steps(spec)]
    if special:
        again = sample_tokens(logits[special], [specs[row] for row in special])
        for row, result in zip(special, again, strict=True):
            drawn[row] = result
    return drawn


def require_finite(token: int) -> int:
    """Return the token. Raises NodeFailed for -1, the token of logits that are not finite."""
    if token < 0:
        raise NodeFailed("logits are not finite: the model's weights or its KV cache are damaged")
    return token
