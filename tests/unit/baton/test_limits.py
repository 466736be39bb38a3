"""Every number that a client can send: both ends of its range are accepted, what is just beyond is
refused by name."""

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.limits import (
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    ModelBounds,
    check_prompt,
    check_sampling,
)
from baton.types import GrammarKind, SamplingParams, StructuredOutput

BOUNDS = ModelBounds(vocab_size=1000, max_model_len=100, cache_tokens=5000)
RIGHT = SamplingParams(max_tokens=10)

FINE: dict[str, list[Any]] = {
    "max_tokens": [1, 90],
    "temperature": [0.0, 2.0],
    "top_p": [1e-6, 1.0],
    "top_k": [0, 1000],
    "seed": [-MAX_SEED - 1, MAX_SEED],
    "min_tokens": [0, 10],
    "stop_token_ids": [(), (0, 999), tuple(range(MAX_STOP_TOKEN_IDS))],
    "min_p": [0.0, 1.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 100.0],
    "logit_bias": [
        (),
        ((0, -100.0), (999, 100.0)),
        tuple((n % 1000, 1.0) for n in range(MAX_LOGIT_BIAS_ENTRIES)),
    ],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "structured_output": [
        None,
        StructuredOutput(GrammarKind.REGEX, "é" * (MAX_GRAMMAR_BYTES // 2)),
    ],
}
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1],
    "temperature": [-0.1, 2.1, math.nan, math.inf],
    "top_p": [0.0, 1.01, math.nan],
    "top_k": [-1, 1001],
    "seed": [-MAX_SEED - 2, MAX_SEED + 1],
    "min_tokens": [-1, 11],
    "stop_token_ids": [(-1,), (1000,), tuple(range(MAX_STOP_TOKEN_IDS + 1))],
    "min_p": [-0.01, 1.01, math.nan],
    "presence_penalty": [-2.01, 2.01, math.nan],
    "frequency_penalty": [-2.01, 2.01, -math.inf],
    "repetition_penalty": [0.0, 0.0099, -1.0, 100.1, math.nan, math.inf],
    "logit_bias": [
        ((-1, 0.0),),
        ((1000, 0.0),),
        ((1, 100.1),),
        ((1, -100.1),),
        ((1, math.nan),),
        tuple((n % 1000, 1.0) for n in range(MAX_LOGIT_BIAS_ENTRIES + 1)),
    ],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1],
    "structured_output": [
        StructuredOutput(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1)),
        StructuredOutput(GrammarKind.JSON, "é" * (MAX_GRAMMAR_BYTES // 2 + 1)),
    ],
}


def test_every_sampling_field_has_a_case() -> None:
    assert set(SamplingParams.__dataclass_fields__) - {"ignore_eos"} == set(FINE) == set(WRONG)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in FINE for value in FINE[field]]
)
def test_the_ends_of_each_range_are_accepted(field: str, value: Any) -> None:
    check_sampling(replace(RIGHT, **{field: value}), 10, BOUNDS)


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]]
)
def test_out_of_range_value_is_rejected_naming_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        check_sampling(replace(RIGHT, **{field: value}), 10, BOUNDS)
    assert refused.value.param == field


def test_prompt_and_output_share_the_context() -> None:
    with pytest.raises(ContextLengthExceeded, match="--max-model-len"):
        check_sampling(replace(RIGHT, max_tokens=91), 10, BOUNDS)
    with pytest.raises(ContextLengthExceeded, match="--kv-memory"):
        check_sampling(RIGHT, 10, replace(BOUNDS, cache_tokens=16))
    with pytest.raises(ContextLengthExceeded, match="prompt has 100 tokens"):
        check_prompt((1,) * 100, BOUNDS)
    check_prompt((1,) * 99, BOUNDS)


@pytest.mark.parametrize("prompt", [(), (-1,), (1000,)])
def test_invalid_prompts_are_rejected(prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        check_prompt(prompt, BOUNDS)
