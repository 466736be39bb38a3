"""A fake model whose tokens tell the choice and the step, with log probabilities."""

import json
from typing import Any

from baton.types import TokenLogprobs
from coordinator.generation import PromptLogprobsEvent, TokensEvent
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    finished_event,
)
from tests.small_tokenizers import byte_level_tokenizer, byte_tokens

TOP = 7


def expected_token(choice: int, step: int) -> int:
    """A token of one letter."""
    return byte_tokens(bytes([0x30 + 8 * choice + step]))[0]


def expected_score(token: int, top: int | None) -> TokenLogprobs:
    return TokenLogprobs(-float(token), ((TOP, -0.25),)[: top or 0])


def scored_script(generation: FakeGeneration) -> None:
    """As a model: scores where they are asked for, and tokens that tell the choice and the step."""
    request = generation.request
    sampling = request.sampling
    if sampling.prompt_logprobs is not None:
        scores = tuple(
            expected_score(token, sampling.prompt_logprobs)
            for token in request.prompt_token_ids[1:]
        )
        generation.emit_events(PromptLogprobsEvent(scores))
    for step in range(sampling.max_tokens):
        token = expected_token(request.choice_index, step)
        generation.emit_events(
            TokensEvent(
                (token,),
                (expected_score(token, sampling.logprobs),)
                if sampling.logprobs is not None
                else (),
            )
        )
    generation.emit_events(finished_event(cached=5))


def text_of(token: int) -> str:
    return byte_level_tokenizer().decode([token])


async def post_completion(front: FrontendHarness, **fields: object) -> Any:
    response = await front.http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream_completion(front: FrontendHarness, **fields: object) -> list[dict[str, Any]]:
    response = await front.http.post("/v1/completions", json={"stream": True, **fields})
    *parts, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]", response.text
    return [json.loads(part) for part in parts]


def merge_chunks(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream put together as those of a whole answer."""
    whole: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            told = whole.setdefault(choice["index"], choice | {"text": "", "logprobs": None})
            told["text"] += choice["text"]
            told["finish_reason"] = choice["finish_reason"]
            if "stop_reason" in choice:
                told["stop_reason"] = choice["stop_reason"]
            if choice["logprobs"] is not None:
                told["logprobs"] = told["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    told["logprobs"][name] += values
            if (
                told is not choice
                and "token_ids" in choice
                and choice["token_ids"] is not told["token_ids"]
            ):
                told["token_ids"] = told["token_ids"] + choice["token_ids"]
    return [whole[index] for index in sorted(whole)]
