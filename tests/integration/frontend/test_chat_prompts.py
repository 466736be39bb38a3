"""How a prompt is made and returned: truncated, continued, with its tokens; and reasoning."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.types import FinishReason
from coordinator.generation import TokensEvent
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.tokenizer import HfTokenizer
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import byte_level_tokenizer, byte_tokens

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if open %}<think>\n{% endif %}{% endif %}"
    "{# </think> #}"
)
QUESTION = {"role": "user", "content": "a"}
THOUGHT = "<think>\nhm\n</think>\n\nb"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    text = HfTokenizer(byte_level_tokenizer(), bos=None, template=ChatTemplate(TEMPLATE, {}))
    async with running_frontend(text=text) as running:
        yield running


def answer(front: FrontendHarness, text: str) -> None:
    def script(generation: FakeGeneration) -> None:
        generation.emit_events(*(TokensEvent((token,)) for token in byte_tokens(text.encode())))
        generation.emit_events(finished_event(FinishReason.STOP))

    front.backend.script = script


async def ask(front: FrontendHarness, path: str = "chat/completions", **fields: Any) -> Any:
    front.backend.requests.clear()
    body = {"messages": [QUESTION]} if path == "chat/completions" else {}
    response = await front.http.post(f"/v1/{path}", json={**body, **fields})
    assert response.status_code == 200, response.text
    return response


def read_prompt(front: FrontendHarness) -> str:
    return byte_level_tokenizer().decode(list(front.backend.requests[0].prompt_token_ids))


async def test_final_message_is_continued(front: FrontendHarness) -> None:
    answer(front, "b")
    messages = [QUESTION, {"role": "assistant", "content": "The answer "}]
    await ask(front, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert read_prompt(front) == "<user>a.<assistant>The answer "
    refused = await front.http.post(
        "/v1/chat/completions",
        json={
            "messages": messages,
            "add_generation_prompt": True,
            "continue_final_message": True,
        },
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "continue_final_message",
    )


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, (7, 8, 9)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, (0, 1, 2)),
        ({"truncate_prompt_tokens": 99}, tuple(range(10))),
        ({"truncate_prompt_tokens": -1}, tuple(range(10))),
    ],
)
async def test_prompt_is_truncated(
    front: FrontendHarness, fields: dict[str, Any], kept: tuple[int, ...]
) -> None:
    answer(front, "b")
    await ask(front, "completions", prompt=list(range(10)), **fields)
    assert front.backend.requests[0].prompt_token_ids == kept


async def test_long_prompt_is_truncated_to_the_room(front: FrontendHarness) -> None:
    answer(front, "b")
    prompt = [number % 7 for number in range(600)]
    await ask(front, "completions", prompt=prompt, max_tokens=100, truncate_prompt_tokens=-1)
    assert front.backend.requests[0].prompt_token_ids == tuple(prompt[-412:])
    await ask(front, "completions", prompt=prompt, min_tokens=5, truncate_prompt_tokens=-1)
    assert front.backend.requests[0].prompt_token_ids == tuple(prompt[-496:])
    assert front.backend.requests[0].sampling.max_tokens == 16
    refused = await front.http.post(
        "/v1/completions", json={"prompt": [1], "truncate_prompt_tokens": 0}
    )
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_truncated_prompt_is_echoed_as_it_is(front: FrontendHarness) -> None:
    answer(front, "b")
    told = await ask(front, "completions", prompt="hello", truncate_prompt_tokens=1, echo=True)
    (kept,) = front.backend.requests[0].prompt_token_ids
    assert told.json()["choices"][0]["text"] == byte_level_tokenizer().decode([kept]) + "b"


async def test_prompt_tokens_are_returned_once(front: FrontendHarness) -> None:
    answer(front, "bc")
    whole = (await ask(front, return_token_ids=True, n=2)).json()
    prompt = list(front.backend.requests[0].prompt_token_ids)
    assert whole["prompt_token_ids"] == prompt
    streamed = (await ask(front, return_token_ids=True, n=2, stream=True)).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[6:7] == "{"]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [
        prompt
    ]
    whole = (await ask(front, "completions", prompt=[[1], [2]], return_token_ids=True)).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[1], [2]]


@pytest.mark.parametrize(
    ("fields", "output", "content", "reasoning"),
    [
        ({}, THOUGHT, "b", "hm"),
        ({}, "b", "b", None),
        ({"chat_template_kwargs": {"open": True}}, "hm\n</think>b", "b", "hm"),
        ({"include_reasoning": False}, THOUGHT, "b", None),
        ({"separate_reasoning": False}, THOUGHT, THOUGHT, None),
        ({"response_format": {"type": "json_object"}}, "{}", "{}", None),
    ],
)
async def test_reasoning_is_told_from_content(
    front: FrontendHarness,
    fields: dict[str, Any],
    output: str,
    content: str,
    reasoning: str | None,
) -> None:
    answer(front, output)
    message = (await ask(front, **fields)).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert message.get("reasoning") == reasoning
    text = (await ask(front, stream=True, **fields)).text
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"]
        for line in text.split("\n\n")
        if line[6:7] == "{"
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
