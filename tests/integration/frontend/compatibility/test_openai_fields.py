"""Every field of OpenAI's two request schemas, as the installed client has them: honoured, accepted
because it asks for nothing, or refused by name. And every field that HTTP takes has its twin on
gRPC, or a reason not to."""

import typing
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.pb import generation_pb2 as pb
from baton.types import FinishReason, Request
from coordinator.frontend.http.schema.generation_requests import ChatRequest, CompletionRequest
from coordinator.frontend.http.schema.tokenize_request import DetokenizeRequest, TokenizeRequest
from tests.integration.frontend.compatibility.openai_field_tables import (
    CHAT_FIELDS,
    COMMON_FIELDS,
    FIELD_TABLES,
    GOOD_BODIES,
    PATHS,
    sampled_requests,
)
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


def find_value(where: str, requests: list[Request], told: Any) -> object:
    if where == "choices":
        return len(told["choices"])
    first, *rest = where.split(".")
    found: Any = told if first == "told" else requests[0]
    for part in rest if first == "told" else [first, *rest]:
        if isinstance(found, dict | list):
            key: Any = int(part) if part.isdigit() else part
            found = found[key]
        else:
            found = getattr(found, part)
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
    **dict.fromkeys(
        (
            *("tools", "tool_choice", "parallel_tool_calls", "continue_final_message"),
            *("include_reasoning", "separate_reasoning"),
            *("truncate_prompt_tokens", "truncation_side"),
        ),
        "the gRPC door has no tools, no parsed output and no truncation",
    ),
}
GRPC_EQUIVALENTS = {
    "response_format": ("structured_output",),
    "structured_outputs": ("structured_output",),
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
