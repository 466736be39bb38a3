"""When a generation ends, and which tokens may not end it yet. The one place where these rules
stand."""

from collections.abc import Sequence

from baton.types import FinishReason, SamplingParams


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that end this generation. With `ignore_eos`, EOS is a token like any other."""
    return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)


def forbidden_token_ids(
    params: SamplingParams, eos_token_ids: Sequence[int], num_generated: int
) -> tuple[int, ...]:
    """Ids that may not be drawn next, after `num_generated` tokens of output (those of earlier
    attempts included)."""
    return stop_token_ids(params, eos_token_ids) if num_generated < params.min_tokens else ()


def finish_reason(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    max_model_len: int,
    *,
    last_token: int,
    num_generated: int,
    num_tokens: int,
) -> FinishReason | None:
    """Whether the output ends with `last_token`, which is counted in `num_generated` (tokens of
    output, those of earlier attempts included) and in `num_tokens` (prompt and output)."""
    if last_token in stop_token_ids(params, eos_token_ids):
        return FinishReason.STOP
    if num_generated >= params.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
