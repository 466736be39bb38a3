"""Stop rules: when a generation ends, and which tokens may not end it yet."""

from collections.abc import Collection

from baton.types import FinishReason, SamplingParams


def stop_token_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Token ids that end this generation. With `ignore_eos`, EOS does not."""
    return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)


def forbidden_token_ids(
    params: SamplingParams, eos_token_ids: Collection[int], num_generated: int
) -> tuple[int, ...]:
    """Token ids that may not be sampled next: stop tokens, until `min_tokens` were generated.

    `num_generated` counts output tokens, those of earlier attempts included.
    """
    return stop_token_ids(params, eos_token_ids) if num_generated < params.min_tokens else ()


def unwanted_ends(
    params: SamplingParams, eos_token_ids: Collection[int], num_generated: int
) -> tuple[int, ...]:
    """Token ids that the mask of a grammar leaves out, if it allows others.

    These are the forbidden ones, and with `ignore_eos` the end tokens of the model.
    """
    ignored = tuple(eos_token_ids) if params.ignore_eos else ()
    return (*forbidden_token_ids(params, eos_token_ids, num_generated), *ignored)


def finish_reason(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    max_model_len: int,
    *,
    last_token: int,
    num_generated: int,
    num_tokens: int,
) -> FinishReason | None:
    """Why the output ends with `last_token`; None if it goes on.

    `num_generated` counts output tokens, those of earlier attempts included; `num_tokens` counts
    prompt and output. Both include `last_token`.
    """
    if last_token in stop_token_ids(params, eos_token_ids):
        return FinishReason.STOP
    if num_generated >= params.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
