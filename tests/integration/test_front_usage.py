"""stream_options.continuous_usage_stats: each event has what the answer has used so far."""

import json
from typing import Any

import pytest

from coordinator.generation import Delta
from tests.integration.front_fixtures import FakeGeneration, done, serving
from tests.integration.front_text import byte_tokens, chatting_tokenizer

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [1, 2]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
}


def script(generation: FakeGeneration) -> None:
    generation.give(*(Delta(tuple(byte_tokens(text))) for text in (b"a", b"bc", b"d")), done(cached=1))


async def streamed(route: str, fields: dict[str, Any]) -> list[Any]:
    path, good = BODIES[route]
    async with serving(text=chatting_tokenizer()) as front:
        front.brain.script = script
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
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (prompt, prompt + usage["completion_tokens"])
    if final:
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 1})


@pytest.mark.parametrize("route", list(BODIES))
async def test_several_choices_count_together(route: str) -> None:
    chunks = await streamed(route, {"n": 2, "stream_options": {"continuous_usage_stats": True}})
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == 8


@pytest.mark.parametrize("route", list(BODIES))
async def test_it_is_off_by_default(route: str) -> None:
    for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": False}):
        *events, end = await streamed(route, {"stream_options": options})
        assert {json.dumps(event["usage"]) for event in events} == {"null"}
        assert end["usage"]["completion_tokens"] == 4
