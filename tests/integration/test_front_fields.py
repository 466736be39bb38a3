"""Every field of OpenAI's two request schemas, as the installed client has them: honoured, accepted because it asks for
nothing, or refused by name. And every field that HTTP takes has its twin on gRPC, or a reason not to."""

import typing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from baton.pb import generation_pb2 as pb
from baton.types import FinishReason
from coordinator.generation import Submission
from coordinator.http.chat_schema import ChatRequest
from coordinator.http.completion_schema import CompletionRequest
from coordinator.http.token_schema import DetokenizeRequest, TokenizeRequest
from tests.integration.front_fixtures import FakeGeneration, Front, done, serving
from tests.integration.front_text import chatting_tokenizer

chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
completion_params = pytest.importorskip("openai.types.completion_create_params")
pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [1], "max_tokens": 4},
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


@dataclass(frozen=True)
class Field:
    """`honoured`: a value, and where it is seen in what is submitted or told. `accepted` asks for nothing. `refused` is
    not served. `null`: may the field be null, as one that is not there?"""

    honoured: tuple[object, str, object] | None = None
    accepted: tuple[object, ...] = ()
    refused: tuple[object, ...] = ()
    null: bool = True


BOTH: dict[str, Field] = {
    "model": Field(("demo", "told.model", "demo")),
    "frequency_penalty": Field((0.5, "sampling.frequency_penalty", 0.5), (0, 0.0), (2.5, "0")),
    "presence_penalty": Field((-0.5, "sampling.presence_penalty", -0.5), (0,), (-2.5,)),
    "logit_bias": Field(({"5": -3}, "sampling.logit_bias", ((5, -3.0),)), ({},), ({"5": 101}, {"x": 1}, {"5000": 1})),
    "max_tokens": Field((3, "sampling.max_tokens", 3), (), (-1,)),
    "n": Field((2, "choices", 2), (1,), (0, 17)),
    "seed": Field((-(2**63), "sampling.seed", -(2**63)), (2**63 - 1,), (2**63, -(2**63) - 1, 0.5)),
    "stop": Field((["\n"], "told.choices.0.finish_reason", "length"), ([],), ("", ["x"] * 17, 5)),
    "stream": Field(None, (False,), ("yes",)),
    "stream_options": Field(None, (), ({"include_usage": True}, {"x": 1}, 5)),
    "temperature": Field((0.5, "sampling.temperature", 0.5), (), (2.5, -1)),
    "top_p": Field((0.5, "sampling.top_p", 0.5), (1,), (0, 1.5)),
    "user": Field(None, ("me",), (5,)),
}
COMPLETIONS: dict[str, Field] = BOTH | {
    "prompt": Field(([3, 4], "prompt", (3, 4)), (), (5, [1, "a"], None), null=False),
    "best_of": Field(None, (1,), (2,)),
    "echo": Field((True, "told.choices.0.text", "!"), (False,), (1,)),
    "logprobs": Field((2, "sampling.logprobs", 2), (), (21, True)),
    "suffix": Field(None, (), ("x", "")),
}
CHAT: dict[str, Field] = BOTH | {
    "messages": Field(None, (), ([], 5), null=False),
    "audio": Field(None, (), ({"voice": "x", "format": "wav"},)),
    "function_call": Field(None, ("none", "auto"), ({"name": "f"},)),
    "functions": Field(None, ([],), ([{"name": "f"}],)),
    "logprobs": Field((True, "sampling.logprobs", 0), (False,), (1,)),
    "max_completion_tokens": Field(None, (4,), (0, 5)),  # beside max_tokens
    "metadata": Field(None, ({}, {"a": "b"}), ({"a": 1}, "x")),
    "modalities": Field(None, (["text"],), (["text", "audio"],)),
    "moderation": Field(None, (), ({"model": "x"},)),
    "parallel_tool_calls": Field(None, (True, False), (1,)),
    "prediction": Field(None, (), ({"type": "content", "content": "x"},)),
    "prompt_cache_key": Field(None, ("k",), (5,)),
    "prompt_cache_options": Field(None, ({},), ({"x": 1},)),
    "prompt_cache_retention": Field(None, ("in_memory",), ("24h",)),
    "reasoning_effort": Field(None, ("none",), ("low", "medium")),
    "response_format": Field(None, ({"type": "text"},), ({"type": "json_object"}, "text")),
    "safety_identifier": Field(None, ("x",), (5,)),
    "service_tier": Field(None, ("auto", "default"), ("flex", "priority")),
    "store": Field(None, (False,), (True, 0)),
    "tool_choice": Field(None, ("none", "auto"), ("required", {"type": "function", "function": {"name": "f"}})),
    "tools": Field(None, ([],), ([{"type": "function", "function": {"name": "f"}}],)),
    "top_logprobs": Field(None, (0,), (2, 21)),  # without logprobs
    "verbosity": Field(None, ("medium",), ("low",)),
    "web_search_options": Field(None, (), ({},)),
}
TABLES = {"completions": COMPLETIONS, "chat": CHAT}
SCHEMAS = {"completions": completion_params, "chat": chat_params}
CASES = [(route, name) for route, table in TABLES.items() for name in table]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    def script(generation: FakeGeneration) -> None:
        generation.give(done(FinishReason.LENGTH))

    async with serving(text=chatting_tokenizer()) as running:
        running.brain.script = script
        yield running


@pytest.mark.parametrize("route", list(PATHS))
async def test_the_tables_have_every_field(route: str) -> None:
    """A new version of the client that knows more fails here."""
    theirs: set[str] = set()
    for kind in ("CompletionCreateParamsStreaming", "CompletionCreateParamsNonStreaming"):
        theirs |= typing.get_type_hints(getattr(SCHEMAS[route], kind)).keys()
    assert theirs == TABLES[route].keys()


async def post(front: Front, route: str, fields: dict[str, Any]) -> Any:
    front.brain.submissions.clear()
    return await front.http.post(PATHS[route], json=GOOD[route] | fields)


@pytest.mark.parametrize(("route", "name"), CASES)
async def test_openai_fields(front: Front, route: str, name: str) -> None:
    field = TABLES[route][name]
    plain = sampled(front.brain.submissions) if (await post(front, route, {"seed": 1})).status_code == 200 else ()
    for value in (*field.accepted, *([None] if field.null else [])):
        response = await post(front, route, {"seed": 1, name: value})
        assert response.status_code == 200, response.text
        if name not in ("max_tokens", "max_completion_tokens", "seed"):
            assert sampled(front.brain.submissions) == plain
    for value in field.refused:
        response = await post(front, route, {name: value})
        assert response.status_code == 400, f"{name}={value!r} was accepted"
        assert name in response.json()["error"]["message"]
        assert front.brain.submissions == []
    if field.honoured is not None:
        value, where, expected = field.honoured
        response = await post(front, route, {name: value})
        assert response.status_code == 200, response.text
        assert seen(where, front.brain.submissions, response.json()) == expected


def sampled(submissions: list[Submission]) -> tuple[object, ...]:
    return tuple((one.prompt, one.sampling, one.choice) for one in submissions)


def seen(where: str, submissions: list[Submission], told: Any) -> object:
    if where == "choices":
        return len(told["choices"])
    first, *rest = where.split(".")
    found: Any = told if first == "told" else submissions[0]
    for part in rest if first == "told" else [first, *rest]:
        found = (
            getattr(found, part) if not isinstance(found, dict | list) else found[int(part) if part.isdigit() else part]
        )
    return found


# Fields that only one front door has, and why.
HTTP_ONLY = {
    "stream": "which method is called says it",
    "stream_options": "usage always comes with the last message",
    "return_token_ids": "token ids always come",
    "best_of": "it may only repeat n",
    "max_completion_tokens": "another name for max_tokens",
    "top_logprobs": "logprobs is a number for conversations too",
    **dict.fromkeys(CHAT.keys() - BOTH.keys() - {"messages", "logprobs"}, "there is nothing it may ask for"),
    **dict.fromkeys(("request_id", "rid"), "the metadata x-request-id is that id"),
    "session_id": "there is nothing it may ask for",
}
TWINS = {
    "prompt": ("text", "token_ids", "prompts"),
    "messages": ("chat",),
    "add_generation_prompt": ("chat",),
    "chat_template_kwargs": ("chat",),
    "tokens": ("token_ids",),
    "return_token_strs": ("return_token_strings",),
}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (CompletionRequest, pb.GenerateRequest),
        (ChatRequest, pb.GenerateRequest),
        (TokenizeRequest, pb.TokenizeRequest),
        (DetokenizeRequest, pb.DetokenizeRequest),
    ],
)
async def test_every_field_has_its_twin(body: Any, message: Any) -> None:
    fields = set(message.DESCRIPTOR.fields_by_name)
    for name in body.__struct_fields__:
        twins = set(TWINS.get(name, (name,)))
        if message is pb.TokenizeRequest:
            twins -= {"token_ids", "prompts"}
        assert name in HTTP_ONLY or twins <= fields, f"{name} has no twin in {message.DESCRIPTOR.name}"


async def test_every_field_of_grpc_has_its_twin() -> None:
    named = {twin for twins in TWINS.values() for twin in twins}
    bodies = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) <= bodies | named
