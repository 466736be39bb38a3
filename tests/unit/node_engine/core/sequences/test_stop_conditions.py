"""When an output ends, and which tokens may not end it yet."""

import pytest

from baton.types import FinishReason, SamplingParams
from node_engine.core.sequences.stop_rules import finish_reason, forbidden_token_ids

EOS = (2, 3)


def reason(
    params: SamplingParams, token: int, generated: int = 1, tokens: int = 10
) -> FinishReason | None:
    return finish_reason(
        params, EOS, 100, last_token=token, num_generated=generated, num_tokens=tokens
    )


@pytest.mark.parametrize(
    ("params", "token", "generated", "tokens", "want"),
    [
        (SamplingParams(8), 7, 1, 10, None),
        (SamplingParams(8), 2, 1, 10, FinishReason.STOP),
        (SamplingParams(8), 3, 1, 10, FinishReason.STOP),  # every EOS id stops
        (SamplingParams(8, ignore_eos=True), 2, 1, 10, None),
        (SamplingParams(8, ignore_eos=True, stop_token_ids=(2,)), 2, 1, 10, FinishReason.STOP),
        (SamplingParams(8, stop_token_ids=(7,)), 7, 1, 10, FinishReason.STOP),
        (SamplingParams(8), 7, 7, 10, None),
        (SamplingParams(8), 7, 8, 10, FinishReason.LENGTH),
        (SamplingParams(8), 2, 8, 10, FinishReason.STOP),  # EOS as the last allowed token is a stop
        (SamplingParams(1), 7, 1, 10, FinishReason.LENGTH),
        (SamplingParams(8), 7, 1, 99, None),
        (SamplingParams(8), 7, 1, 100, FinishReason.LENGTH),
    ],
)
def test_finish_reason(
    params: SamplingParams, token: int, generated: int, tokens: int, want: FinishReason | None
) -> None:
    assert reason(params, token, generated, tokens) is want


@pytest.mark.parametrize(
    ("params", "generated", "want"),
    [
        (SamplingParams(8), 0, ()),
        (SamplingParams(8, min_tokens=2), 0, EOS),
        (SamplingParams(8, min_tokens=2), 1, EOS),
        (SamplingParams(8, min_tokens=2), 2, ()),
        (SamplingParams(8, min_tokens=2, stop_token_ids=(9,)), 1, (*EOS, 9)),
        (SamplingParams(8, min_tokens=2, stop_token_ids=(9,), ignore_eos=True), 1, (9,)),
    ],
)
def test_forbidden_token_ids(params: SamplingParams, generated: int, want: tuple[int, ...]) -> None:
    assert forbidden_token_ids(params, EOS, generated) == want
