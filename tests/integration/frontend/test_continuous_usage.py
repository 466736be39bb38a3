"""stream_options.continuous_usage_stats: each event has what the answer has used so far."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from baton.types import SamplingParams
from coordinator.frontend.http.responses.usage import partial_usage
from coordinator.frontend.output import ChoiceStream, OutputProcessor, ResponseStream
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    finished_event,
    running_frontend,
)
from tests.new_requests import make_choices
from tests.small_tokenizers import byte_tokens, chat_tokenizer, hello_tokenizer

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [1, 2]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
}


def generate_tokens(generation: FakeGeneration) -> None:
    generation.emit_events(
        *(TokensEvent(tuple(byte_tokens(text))) for text in (b"a", b"bc", b"d")),
        finished_event(cached=1),
    )


async def streamed(route: str, fields: dict[str, Any]) -> list[Any]:
    path, good = BODIES[route]
    async with running_frontend(text=chat_tokenizer()) as front:
        front.backend.script = generate_tokens
        response = await front.http.post(path, json=good | {"stream": True} | fields)
    *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("route", list(BODIES))
@pytest.mark.parametrize("final", [True, False])
async def test_every_event_has_the_usage_so_far(route: str, final: bool) -> None:
    options = {"include_usage": final, "continuous_usage_stats": True}
    chunks = await streamed(route, {"stream_options": options})
    prompt = chunks[0]["usage"]["prompt_tokens"]
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    role = [0] if route == "chat" else []  # before the first token
    assert told == [*role, 1, 3, 4, 4, *([4] if final else [])]
    for chunk in chunks:
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (
            prompt,
            prompt + usage["completion_tokens"],
        )
    if final:
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["prompt_tokens_details"]) == (
            [],
            {"cached_tokens": 1},
        )


@pytest.mark.parametrize("route", list(BODIES))
async def test_usage_counts_all_choices(route: str) -> None:
    chunks = await streamed(route, {"n": 2, "stream_options": {"continuous_usage_stats": True}})
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == 8


@pytest.mark.parametrize("route", list(BODIES))
async def test_continuous_usage_is_off_by_default(route: str) -> None:
    for options in (
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": False},
    ):
        *events, end = await streamed(route, {"stream_options": options})
        assert {json.dumps(event["usage"]) for event in events} == {"null"}
        assert end["usage"]["completion_tokens"] == 4


class CountingList(list[Any]):
    """A list that counts how often all of it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("stop", [(), ("never said",)])
async def test_usage_cost_per_event_does_not_grow_with_prompts_and_choices(
    stop: tuple[str, ...],
) -> None:
    """They are gone through at the start and at the end, however many events there are."""
    passes = set()
    for steps in (1, 20):
        generations = [
            FakeGeneration(request)
            for request in make_choices((1,), SamplingParams(steps), 9.0, count=2)
        ]
        for generation in generations:
            generation.emit_events(*[TokensEvent((65, 66))] * steps, finished_event())
        text = hello_tokenizer()
        prompts = CountingList([(1, 2, 3)] * 2)
        choices = CountingList(
            [
                ChoiceStream(
                    one, partial(OutputProcessor, n, text.create_detokenizer(), stop=stop), n
                )
                for n, one in enumerate(generations)
            ]
        )
        answer = ResponseStream("m", 0, text, prompts, choices)
        used = [partial_usage(answer) async for _ in answer.output_chunks()]
        assert (used[-1].prompt_tokens, used[-1].completion_tokens) == (6, 2 * 2 * steps)
        passes.add((prompts.passes, choices.passes))
    assert len(passes) == 1
