"""What the same prompts get from two `LLM`s."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from offline.llm import LLM
from offline.outputs import CompletionOutput, LogprobsAtPosition, RequestOutput
from offline.request_bodies import Prompt
from offline.sampling_params import SamplingParams


def generate_everything(llm: LLM, text: str) -> list[RequestOutput]:
    """Texts, token ids, conversations; greedy, drawn, constrained; choices, logprobs, stop strings.

    The fourth of the seven results is the constrained one.
    """
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(seed=7, n=2, max_tokens=8, ignore_eos=True, stop=["zz", "e "])
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    constrained = replace(
        greedy, ignore_eos=False, structured_outputs={"regex": "(fox|dog)( [a-z]{2}){2}"}
    )
    talk = [[{"role": "user", "content": content}] for content in ("fox", "dog")]
    prompts: list[Prompt] = [text, [5, 6, 7], text[:9], text]
    return [
        *llm.generate(prompts, [greedy, drawn, scored, constrained], use_tqdm=False),
        *llm.chat(talk, [greedy, drawn], use_tqdm=False),
        *llm.chat(talk[0], scored, use_tqdm=False),
    ]


def assert_same_output(one: RequestOutput, other: RequestOutput) -> None:
    """Equal but for ids, what caches held, and rounding of log probabilities."""
    assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
    for answer, expected in zip(one.outputs, other.outputs, strict=True):
        assert _without_logprobs(answer) == _without_logprobs(expected)
        _assert_close(answer.logprobs, expected.logprobs)
    _assert_close(one.prompt_logprobs, other.prompt_logprobs)


def _without_logprobs(answer: CompletionOutput) -> CompletionOutput:
    return replace(answer, logprobs=None, cumulative_logprob=None)


Positions = Sequence[LogprobsAtPosition | None] | None


def _assert_close(one: Positions, other: Positions) -> None:
    assert (one is None) == (other is None)
    assert _list_values(one) == pytest.approx(_list_values(other), abs=1e-4)


def _list_values(positions: Positions) -> list[float]:
    return [entry.logprob for each in positions or () if each for entry in each.values()]
