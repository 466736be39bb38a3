"""POST /v1/responses: text, reasoning and calls, whole and as events; input of several turns."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.errors import NodeFailed
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
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
OUTPUT = (
    "<think>\nHow much?\n</think>\n\nOne moment.\n"
    '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    text = HfTokenizer(byte_level_tokenizer(), bos=None, template=ChatTemplate(TEMPLATE, {}))
    async with running_frontend(text=text) as running:
        yield running


def answer(
    front: FrontendHarness,
    text: str,
    end: FinishReason | Exception = FinishReason.STOP,
) -> None:
    """Every request is answered with this text, a few tokens in each step."""

    def script(generation: FakeGeneration) -> None:
        tokens = byte_tokens(text.encode())
        steps = [tokens[place : place + 3] for place in range(0, len(tokens), 3)]
        generation.emit_events(*(TokensEvent(tuple(step)) for step in steps))
        generation.emit_events(end if isinstance(end, Exception) else finished_event(end))

    front.backend.script = script


async def ask(front: FrontendHarness, **fields: Any) -> Any:
    front.backend.requests.clear()
    response = await front.http.post("/v1/responses", json={"input": "1+1?", **fields})
    assert response.status_code == 200, response.text
    return response


def read_prompt(front: FrontendHarness) -> str:
    return byte_level_tokenizer().decode(list(front.backend.requests[0].prompt_token_ids))


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_whole_response(front: FrontendHarness) -> None:
    answer(front, OUTPUT)
    told = (await ask(front, tools=[TOOL], instructions="Be brief.", metadata={"a": "b"})).json()
    assert read_prompt(front) == "[add]<system>Be brief.<user>1+1?<assistant>"
    assert (told["object"], told["status"], told["store"]) == ("response", "completed", False)
    assert (told["tools"], told["metadata"]) == ([{**TOOL, "description": None}], {"a": "b"})
    reasoning, message, call = told["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "How much?"}]
    assert [part["text"] for part in message["content"]] == ["One moment.\n"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"x": 1}')
    assert call["call_id"].startswith("call_")
    usage = told["usage"]
    assert usage["output_tokens"] == len(OUTPUT)
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


async def test_events_tell_the_whole_response(front: FrontendHarness) -> None:
    answer(front, OUTPUT)
    whole = (await ask(front, tools=[TOOL])).json()["output"]
    events = read_events((await ask(front, tools=[TOOL], stream=True)).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    told = [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]]
    assert told == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    changing = {"id", "call_id"}
    assert [{k: v for k, v in item.items() if k not in changing} for item in done] == [
        {k: v for k, v in item.items() if k not in changing} for item in whole
    ]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == '{"x": 1}'
    assert len(deltas) > 1


async def test_input_of_several_turns(front: FrontendHarness) -> None:
    answer(front, "2")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "Add."}
        ]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
            {"type": "output_text", "text": "Wait.", "annotations": []}
        ]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "2"},
    ]  # fmt: skip
    told = (await ask(front, input=items)).json()
    assert [item["type"] for item in told["output"]] == ["message"]
    assert read_prompt(front) == (
        "<user>1+1?<assistant><think>Add.</think>Wait."
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call><tool>2<assistant>'
    )


async def test_cut_response_is_incomplete(front: FrontendHarness) -> None:
    answer(front, "one two", FinishReason.LENGTH)
    told = (await ask(front, max_output_tokens=7)).json()
    assert (told["status"], told["incomplete_details"]["reason"]) == (
        "incomplete",
        "max_output_tokens",
    )
    assert told["output"][0]["status"] == "incomplete"
    events = read_events((await ask(front, max_output_tokens=7, stream=True)).text)
    assert events[-1]["type"] == "response.incomplete"


async def test_error_in_mid_stream_is_the_last_event(front: FrontendHarness) -> None:
    answer(front, "one", NodeFailed("the node failed"))
    events = read_events((await ask(front, stream=True)).text)
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "node_failed")


async def test_structured_text_and_forced_call(front: FrontendHarness) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    answer(front, '{"x": 1}')
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    told = (await ask(front, text={"format": text_format})).json()
    assert told["output"][0]["content"][0]["text"] == '{"x": 1}'
    assert told["text"]["format"]["schema"] == schema
    grammar = front.backend.requests[0].sampling.structured_output
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.JSON, schema)
    choice = {"type": "function", "name": "add"}
    told = (await ask(front, tools=[TOOL], tool_choice=choice)).json()
    (call,) = told["output"]
    assert (call["name"], call["arguments"]) == ("add", '{"x": 1}')


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "no response is kept here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "input has 0 messages"),
        ({"input": [{"type": "item_reference"}]}, "input", "input[0] has the type"),
        (
            {"input": [{"role": "user"}]},
            "input",
            "input[0] is a message: it needs role and content",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "input[0].content[0] has the type 'input_image'",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "["},
                ]
            },
            "input",
            "input[1].tool_calls[0].function.arguments is not JSON",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] has the type 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "tools is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "missing"),
        ({"background": True}, "background", "not available"),
        ({"colour": "red"}, "colour", "is not a field of this request"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
async def test_bad_requests_are_refused_by_name(
    front: FrontendHarness, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await front.http.post("/v1/responses", json={"input": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


async def test_embeddings_are_refused(front: FrontendHarness) -> None:
    response = await front.http.post("/v1/embeddings", json={"input": "a", "model": "demo"})
    assert response.status_code == 400
    assert "generates text" in response.json()["error"]["message"]


async def test_tokenizer_info_has_the_chat_template(front: FrontendHarness) -> None:
    told = (await front.http.get("/tokenizer_info")).json()
    assert told["chat_template"] == TEMPLATE
