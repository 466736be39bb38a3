"""Tools over HTTP: prompts with tools, calls in outputs, and a history of calls."""

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from baton.types import FinishReason, GrammarKind
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
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for name, value in call.function.arguments | items %} {{ name }}={{ value }}{% endfor %}"
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "strict": True,
    },
}
CALL_TEXT = 'One moment.\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
QUESTION = {"role": "user", "content": "1+1?"}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    text = HfTokenizer(byte_level_tokenizer(), bos=None, template=ChatTemplate(TEMPLATE, {}))
    async with running_frontend(text=text) as running:
        yield running


def answer(front: FrontendHarness, text: str, reason: FinishReason = FinishReason.STOP) -> None:
    """Every request is answered with this text, one token for each byte."""

    def script(generation: FakeGeneration) -> None:
        tokens = byte_tokens(text.encode())
        steps = [tokens[place : place + 3] for place in range(0, len(tokens), 3)]
        generation.emit_events(*(TokensEvent(tuple(step)) for step in steps))
        generation.emit_events(finished_event(reason))

    front.backend.script = script


async def ask(front: FrontendHarness, **fields: Any) -> Any:
    front.backend.requests.clear()
    body = {"messages": [QUESTION], "tools": [TOOL], **fields}
    response = await front.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


async def read_prompt(front: FrontendHarness) -> str:
    tokens = front.backend.requests[0].prompt_token_ids
    return byte_level_tokenizer().decode(list(tokens))


async def test_call_in_the_output(front: FrontendHarness) -> None:
    answer(front, CALL_TEXT)
    (choice,) = (await ask(front)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {
        "role": "assistant",
        "content": "One moment.\n",
        "refusal": None,
    }
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    shown = {name: value for name, value in TOOL["function"].items() if name != "strict"}
    rendered = json.dumps({"type": "function", "function": shown})
    assert await read_prompt(front) == f"<tools>{rendered}</tools><user>1+1?<assistant>"


async def test_streamed_call_equals_the_whole(front: FrontendHarness) -> None:
    answer(front, CALL_TEXT)
    response = await ask(front, stream=True)
    *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "One moment.\n"
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0}
    assert calls[0]["function"]["name"] == "add"
    assert [call.get("id") for call in calls[1:]] == [None] * (len(calls) - 1)
    assert len(calls) > 2
    assert "".join(call["function"]["arguments"] for call in calls) == '{"x": 1}'


async def test_cut_call_ends_with_length(front: FrontendHarness) -> None:
    answer(front, CALL_TEXT[:-15], FinishReason.LENGTH)
    (choice,) = (await ask(front)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": '


async def test_malformed_call_stays_content(front: FrontendHarness) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"x": one}}</tool_call>'
    answer(front, text)
    (choice,) = (await ask(front)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


async def test_one_call_without_parallel_tool_calls(front: FrontendHarness) -> None:
    answer(front, CALL_TEXT * 2)
    for parallel, count in ((True, 2), (False, 1)):
        (choice,) = (await ask(front, parallel_tool_calls=parallel)).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == count


async def test_tools_that_may_not_be_called_are_not_shown(front: FrontendHarness) -> None:
    answer(front, CALL_TEXT)
    (choice,) = (await ask(front, tool_choice="none")).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL_TEXT, "stop")
    assert await read_prompt(front) == "<user>1+1?<assistant>"


async def test_history_of_calls_reaches_the_template(front: FrontendHarness) -> None:
    answer(front, "2")
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    await ask(front, messages=messages, tool_choice="none")
    assert await read_prompt(front) == (
        "<user>1+1?<assistant><tool_call>add x=1</tool_call><tool>2<assistant>"
    )


def call_with(**function: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "add", **function}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOL] * 2}, "tools", "tools has 2 functions 'add'"),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0] has the type 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] has the type"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "tools[0].function.name is 'a b'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
            "tools",
            "tools has 129 functions: at most 128",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "description": "x" * 2**18}}
                ]
            },
            "tools",
            "at most 262144",
        ),
        ({"tool_choice": "always"}, "tool_choice", "must be none, auto, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "tools has no such function",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "tools is missing"),
        (
            {"tool_choice": "required", "structured_outputs": {"choice": ["a"]}},
            "tool_choice",
            "but structured_outputs also says what the answer has to be",
        ),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [call_with()]}]},
            "messages",
            "messages[0].tool_calls is given: only messages of the role assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_with(arguments="{")]}]},
            "messages",
            "messages[0].tool_calls[0].function.arguments is not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_with(arguments="[]")]}]},
            "messages",
            "messages[0].tool_calls[0].function.arguments is not a JSON object",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [call_with(arguments='{"a":' * 999)]}
                ]
            },
            "messages",
            "is not JSON",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
async def test_bad_tools_are_refused_by_name(
    front: FrontendHarness, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"messages": [QUESTION], "tools": [TOOL], **fields}
    response = await front.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


async def test_forced_calls_are_constrained(front: FrontendHarness) -> None:
    arguments = '{"x": 1}'
    outputs = {
        "required": f'[{{"name": "add", "parameters": {arguments}}}]',
        "named": arguments,
    }
    for kind, output in outputs.items():
        answer(front, output)
        named = {"type": "function", "function": {"name": "add"}}
        choice = named if kind == "named" else kind
        # which describes the text of an answer, and is sent beside a forced call by some clients
        other_format = {"type": "json_object"}
        (told,) = (await ask(front, tool_choice=choice, response_format=other_format)).json()[
            "choices"
        ]
        (call,) = told["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": arguments}
        assert told["finish_reason"] == ("stop" if kind == "named" else "tool_calls")
        grammar = front.backend.requests[0].sampling.structured_output
        assert grammar is not None
        assert grammar.kind is GrammarKind.JSON
        schema = json.loads(grammar.text)
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(output))
