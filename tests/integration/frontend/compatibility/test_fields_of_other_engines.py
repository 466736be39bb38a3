"""Fields of vLLM, SGLang and TensorRT-LLM: each is served, or accepted where it asks for nothing
and else refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.frontend.http.schema.body_decoder import RequestBody
from coordinator.frontend.http.schema.chat_messages import ChatMessageParam
from coordinator.frontend.http.schema.generation_requests import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from coordinator.frontend.http.schema.tokenize_request import DetokenizeRequest, TokenizeRequest
from coordinator.frontend.http.schema.unsupported_fields import with_unsupported_fields
from tests.integration.frontend.compatibility.openai_field_tables import (
    GOOD_BODIES,
    sampled_requests,
)
from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
)

ENGINES = json.loads(
    (Path(__file__).resolve().parents[3] / "data" / "engine_fields.json").read_text()
)
BODIES: dict[str, tuple[str, type[RequestBody], dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionRequest, GOOD_BODIES["completions"]),
    "chat": ("/v1/chat/completions", ChatRequest, GOOD_BODIES["chat"]),
    "tokenize": ("/tokenize", TokenizeRequest, {"prompt": "hello"}),
    "detokenize": ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
}
UNSUPPORTED_VALUE = {"x": ["something"]}  # what no field has as a value that asks for nothing
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("engine", list(ENGINES))
async def test_every_field_of_an_engine_is_known(engine: str) -> None:
    for route in ("completions", "chat"):
        known = with_unsupported_fields(BODIES[route][1]).__struct_fields__
        assert set(ENGINES[engine][route]) <= set(known)
    assert set(ENGINES[engine]["stream_options"]) <= set(StreamOptions.__struct_fields__)


@pytest.mark.parametrize("route", list(BODIES))
async def test_neutral_values_change_nothing(front: FrontendHarness, route: str) -> None:
    path, kind, good = BODIES[route]
    fixed = {"seed": 1} if route in GOOD_BODIES else {}
    front.backend.requests.clear()
    plain = await front.http.post(path, json=good | fixed)
    expected = sampled_requests(front.backend.requests)
    assert plain.status_code == 200
    for name, accepted in kind.no_ops.items():
        for value in (None, *accepted):
            front.backend.requests.clear()
            response = await front.http.post(path, json=good | fixed | {name: value})
            assert response.status_code == 200, (name, value, response.text)
            assert sampled_requests(front.backend.requests) == expected


@pytest.mark.parametrize("route", list(BODIES))
async def test_unsupported_values_are_refused_by_name(front: FrontendHarness, route: str) -> None:
    path, kind, good = BODIES[route]
    front.backend.requests.clear()
    for name in kind.no_ops:
        response = await front.http.post(path, json=good | {name: UNSUPPORTED_VALUE})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == name
    assert front.backend.requests == []


async def test_extra_fields_of_a_message(front: FrontendHarness) -> None:
    for name, accepted in ChatMessageParam.no_ops.items():
        for value in (None, *accepted):
            message = {"role": "user", "content": "hello", name: value}
            assert (
                await front.http.post("/v1/chat/completions", json={"messages": [message]})
            ).status_code == 200
        message = {"role": "user", "content": "hello", name: UNSUPPORTED_VALUE}
        response = await front.http.post("/v1/chat/completions", json={"messages": [message]})
        assert (response.status_code, f"messages[0].{name} " in response.text) == (400, True)


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (5, 5)])
async def test_top_k_is_off_at_minus_one(front: FrontendHarness, given: int, used: int) -> None:
    front.backend.requests.clear()
    response = await front.http.post(
        "/v1/completions", json=GOOD_BODIES["completions"] | {"top_k": given}
    )
    assert (response.status_code, front.backend.requests[0].sampling.top_k) == (200, used)
    refused = await front.http.post(
        "/v1/completions", json=GOOD_BODIES["completions"] | {"top_k": -2}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_k")


async def test_message_without_text_is_an_empty_one(front: FrontendHarness) -> None:
    asked = {"role": "user", "content": "a"}
    prompts = []
    for content in (None, ""):
        front.backend.requests.clear()
        body = {"messages": [asked, {"role": "assistant", "content": content}, asked]}
        assert (await front.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompts.append(front.backend.requests[0].prompt_token_ids)
    assert prompts[0] == prompts[1]
    silent = await front.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": None}]}
    )
    assert (silent.status_code, "messages[0].content is missing" in silent.text) == (400, True)


async def test_tools_that_may_not_be_called_are_accepted(front: FrontendHarness) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    taken = await front.http.post(
        "/v1/chat/completions", json=GOOD_BODIES["chat"] | tools | {"tool_choice": "none"}
    )
    assert taken.status_code == 200
    for choice in ({}, {"tool_choice": None}, {"tool_choice": "auto"}):
        refused = await front.http.post(
            "/v1/chat/completions", json=GOOD_BODIES["chat"] | tools | choice
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_request_id_in_the_body_is_checked(front: FrontendHarness, name: str) -> None:
    for good in ("req-1", None):
        assert (
            await front.http.post("/v1/completions", json=GOOD_BODIES["completions"] | {name: good})
        ).status_code == 200
    for bad in ("", "x" * 129, "\n", 5):
        refused = await front.http.post(
            "/v1/completions", json=GOOD_BODIES["completions"] | {name: bad}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
