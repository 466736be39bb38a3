"""Every field of OpenAI's two request schemas, as the installed client has them: honoured, accepted
because it asks for nothing, or refused by name. And every field that HTTP takes has its twin on
gRPC, or a reason not to."""

import typing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from baton.pb import generation_pb2 as pb
from baton.types import FinishReason, Request
from coordinator.frontend.http.schema.generation_requests import ChatRequest, CompletionRequest
from coordinator.frontend.http.schema.tokenize_request import DetokenizeRequest, TokenizeRequest
from tests.integration.frontend.frontend_harness import (
    FakeGeneration,
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import chat_tokenizer

chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
completion_params = pytest.importorskip("openai.types.completion_create_params")
pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD_BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [1], "max_tokens": 4},
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


@dataclass(frozen=True)
class FieldCase:
    """`honoured_value`: a value, and where it is seen in what is submitted or told.
    `accepted_values` asks for nothing. `refused_values` is not served. `accepts_null`: may the
    field be null, as one that is not there?"""

    honoured_value: tuple[object, str, object] | None = None
    accepted_values: tuple[object, ...] = ()
    refused_values: tuple[object, ...] = ()
    accepts_null: bool = True


COMMON_FIELDS: dict[str, FieldCase] = {
    "model": FieldCase(("demo", "told.model", "demo")),
    "frequency_penalty": FieldCase((0.5, "sampling.frequency_penalty", 0.5), (0, 0.0), (2.5, "0")),
    "presence_penalty": FieldCase((-0.5, "sampling.presence_penalty", -0.5), (0,), (-2.5,)),
    "logit_bias": FieldCase(
        ({"5": -3}, "sampling.logit_bias", ((5, -3.0),)), ({},), ({"5": 101}, {"x": 1}, {"5000": 1})
    ),
    "max_tokens": FieldCase((3, "sampling.max_tokens", 3), (), (-1,)),
    "n": FieldCase((2, "choices", 2), (1,), (0, 17)),
    "seed": FieldCase(
        (-(2**63), "sampling.seed", -(2**63)), (2**63 - 1,), (2**63, -(2**63) - 1, 0.5)
    ),
    "stop": FieldCase(
        (["\n"], "told.choices.0.finish_reason", "length"), ([],), ("", ["x"] * 17, 5)
    ),
    "stream": FieldCase(None, (False,), ("yes",)),
    "stream_options": FieldCase(None, (), ({"include_usage": True}, {"x": 1}, 5)),
    "temperature": FieldCase((0.5, "sampling.temperature", 0.5), (), (2.5, -1)),
    "top_p": FieldCase((0.5, "sampling.top_p", 0.5), (1,), (0, 1.5)),
    "user": FieldCase(None, ("me",), (5,)),
}
COMPLETION_FIELDS: dict[str, FieldCase] = COMMON_FIELDS | {
    "prompt": FieldCase(
        ([3, 4], "prompt_token_ids", (3, 4)), (), (5, [1, "a"], None), accepts_null=False
    ),
    "best_of": FieldCase(None, (1,), (2,)),
    "echo": FieldCase((True, "told.choices.0.text", "!"), (False,), (1,)),
    "logprobs": FieldCase((2, "sampling.logprobs", 2), (), (21, True)),
    "suffix": FieldCase(None, (), ("x", "")),
}
CHAT_FIELDS: dict[str, FieldCase] = COMMON_FIELDS | {
    "messages": FieldCase(None, (), ([], 5), accepts_null=False),
    "audio": FieldCase(None, (), ({"voice": "x", "format": "wav"},)),
    "function_call": FieldCase(None, ("none", "auto"), ({"name": "f"},)),
    "functions": FieldCase(None, ([],), ([{"name": "f"}],)),
    "logprobs": FieldCase((True, "sampling.logprobs", 0), (False,), (1,)),
    "max_completion_tokens": FieldCase(None, (4,), (0, 5)),  # beside max_tokens
    "metadata": FieldCase(None, ({}, {"a": "b"}), ({"a": 1}, "x")),
    "modalities": FieldCase(None, (["text"],), (["text", "audio"],)),
    "moderation": FieldCase(None, (), ({"model": "x"},)),
    "parallel_tool_calls": FieldCase(None, (True, False), (1,)),
    "prediction": FieldCase(None, (), ({"type": "content", "content": "x"},)),
    "prompt_cache_key": FieldCase(None, ("k",), (5,)),
    "prompt_cache_options": FieldCase(None, ({},), ({"x": 1},)),
    "prompt_cache_retention": FieldCase(None, ("in_memory",), ("24h",)),
    "reasoning_effort": FieldCase(None, ("none",), ("low", "medium")),
    "response_format": FieldCase(None, ({"type": "text"},), ({"type": "json_object"}, "text")),
    "safety_identifier": FieldCase(None, ("x",), (5,)),
    "service_tier": FieldCase(None, ("auto", "default"), ("flex", "priority")),
    "store": FieldCase(None, (False,), (True, 0)),
    "tool_choice": FieldCase(
        None, ("none", "auto"), ("required", {"type": "function", "function": {"name": "f"}})
    ),
    "tools": FieldCase(None, ([],), ([{"type": "function", "function": {"name": "f"}}],)),
    "top_logprobs": FieldCase(None, (0,), (2, 21)),  # without logprobs
    "verbosity": FieldCase(None, ("medium",), ("low",)),
    "web_search_options": FieldCase(None, (), ({},)),
}
FIELD_TABLES = {"completions": COMPLETION_FIELDS, "chat": CHAT_FIELDS}
SCHEMAS = {"completions": completion_params, "chat": chat_params}
CASES = [(route, name) for route, table in FIELD_TABLES.items() for name in table]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    def script(generation: FakeGeneration) -> None:
        generation.emit_events(finished_event(FinishReason.LENGTH))

    async with running_frontend(text=chat_tokenizer()) as running:
        running.backend.script = script
        yield running


@pytest.mark.parametrize("route", list(PATHS))
async def test_field_tables_cover_the_openai_schemas(route: str) -> None:
    """A new version of the client that knows more fails here."""
    theirs: set[str] = set()
    for kind in ("CompletionCreateParamsStreaming", "CompletionCreateParamsNonStreaming"):
        theirs |= typing.get_type_hints(getattr(SCHEMAS[route], kind)).keys()
    assert theirs == FIELD_TABLES[route].keys()


async def post(front: FrontendHarness, route: str, fields: dict[str, Any]) -> Any:
    front.backend.requests.clear()
    return await front.http.post(PATHS[route], json=GOOD_BODIES[route] | fields)


@pytest.mark.parametrize(("route", "name"), CASES)
async def test_openai_field_is_honoured_accepted_or_refused(
    front: FrontendHarness, route: str, name: str
) -> None:
    field = FIELD_TABLES[route][name]
    plain = (
        sampled_requests(front.backend.requests)
        if (await post(front, route, {"seed": 1})).status_code == 200
        else ()
    )
    for value in (*field.accepted_values, *([None] if field.accepts_null else [])):
        response = await post(front, route, {"seed": 1, name: value})
        assert response.status_code == 200, response.text
        if name not in ("max_tokens", "max_completion_tokens", "seed"):
            assert sampled_requests(front.backend.requests) == plain
    for value in field.refused_values:
        response = await post(front, route, {name: value})
        assert response.status_code == 400, f"{name}={value!r} was accepted"
        assert name in response.json()["error"]["message"]
        assert front.backend.requests == []
    if field.honoured_value is not None:
        value, where, expected = field.honoured_value
        response = await post(front, route, {name: value})
        assert response.status_code == 200, response.text
        assert find_value(where, front.backend.requests, response.json()) == expected


def sampled_requests(requests: list[Request]) -> tuple[object, ...]:
    return tuple((one.prompt_token_ids, one.sampling, one.choice_index) for one in requests)


def find_value(where: str, requests: list[Request], told: Any) -> object:
    if where == "choices":
        return len(told["choices"])
    first, *rest = where.split(".")
    found: Any = told if first == "told" else requests[0]
    for part in rest if first == "told" else [first, *rest]:
        found = (
            getattr(found, part)
            if not isinstance(found, dict | list)
            else found[int(part) if part.isdigit() else part]
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
    **dict.fromkeys(
        CHAT_FIELDS.keys() - COMMON_FIELDS.keys() - {"messages", "logprobs"},
        "there is nothing it may ask for",
    ),
    **dict.fromkeys(("request_id", "rid"), "the metadata x-request-id is that id"),
    "session_id": "there is nothing it may ask for",
}
GRPC_EQUIVALENTS = {
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
async def test_every_http_field_exists_in_grpc(body: Any, message: Any) -> None:
    fields = set(message.DESCRIPTOR.fields_by_name)
    for name in body.__struct_fields__:
        twins = set(GRPC_EQUIVALENTS.get(name, (name,)))
        if message is pb.TokenizeRequest:
            twins -= {"token_ids", "prompts"}
        assert name in HTTP_ONLY or twins <= fields, (
            f"{name} has no twin in {message.DESCRIPTOR.name}"
        )


async def test_every_grpc_field_exists_in_http() -> None:
    named = {twin for twins in GRPC_EQUIVALENTS.values() for twin in twins}
    bodies = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) <= bodies | named
