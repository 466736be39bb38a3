"""Draws the tokens of a step on the device, and reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.errors import NodeFailed
from kv_kernels.triton.sampling import SamplingRows, sample_rows
from node_engine.core.step.step_batch import SampleSpec, SliceResult
from node_engine.model.gpu.fused_transformer import FusedTransformer
from node_engine.model.gpu.step_inputs import StepInputs, build_sampling_rows
from node_engine.model.sampling.sampler import needs_extra_steps, sample_tokens


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step on the device."""

    logits: torch.Tensor  # [draws, vocab]
    tokens: torch.Tensor  # int64 [draws], -1 where the logits are not finite


def draw_tokens(
    model: FusedTransformer,
    hidden: torch.Tensor,  # [draws, hidden]
    sampling: SamplingRows,
) -> StepOutput:
    """Queue the draws of a step."""
    logits = model.compute_logits(hidden)
    return StepOutput(logits, sample_rows(logits, sampling))


def read_draws(
    inputs: StepInputs,
    logits: torch.Tensor,  # [draws, vocab]
    tokens: list[int],  # one per draw, or more
) -> list[SliceResult]:
    """The result of each draw. Rows with penalties, bias or logprobs are drawn again with these.

    Raises NodeFailed if logits are not finite.
    """
    specs = inputs.sample_specs
    drawn = [SliceResult(require_finite(token)) for token in tokens[: len(specs)]]
    special = [row for row, spec in enumerate(specs) if needs_extra_steps(spec)]
    if special:
        again = sample_tokens(logits[special], [specs[row] for row in special], _draw_on_device)
        for row, result in zip(special, again, strict=True):
            drawn[row] = result
    return drawn


def require_finite(token: int) -> int:
    """Return the token. Raises NodeFailed for -1, the token of logits that are not finite."""
    if token < 0:
        raise NodeFailed("logits are not finite: the model's weights or its KV cache are damaged")
    return token


def _draw_on_device(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    rows = build_sampling_rows(specs, logits.device)
    return [require_finite(token) for token in sample_rows(logits, rows).tolist()]
