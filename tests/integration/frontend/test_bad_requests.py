"""One table of bad requests, two front doors: the exact status, code and field of each, and nothing
submitted."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from baton.limits import MAX_BODY_BYTES
from baton.pb import generation_pb2 as pb
from tests.integration.frontend.bad_request_cases import (
    BAD_ON_BOTH,
    BAD_ON_GRPC,
    BAD_ON_HTTP,
    GOOD_BODY,
    BadRequestCase,
)
from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
    await_grpc_error,
    running_frontend,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    async with running_frontend() as running:
        yield running


def case_name(bad: BadRequestCase) -> str:
    return bad.name


@pytest.mark.parametrize("bad", BAD_ON_BOTH + BAD_ON_HTTP, ids=case_name)
async def test_http_refuses_bad_request_with_status_and_field(
    front: FrontendHarness, bad: BadRequestCase
) -> None:
    before = len(front.refused_codes)
    body = {"content": bad.body} if isinstance(bad.body, bytes) else {"json": bad.body}
    response = await front.http.post("/v1/completions", **body)
    assert response.status_code == bad.expected_status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        bad.expected_code,
        bad.expected_param,
    )
    assert bad.expected_message in error["message"]
    assert front.backend.requests == []
    assert front.refused_codes[before:] == [bad.expected_code]


@pytest.mark.parametrize("streaming", [False, True], ids=["once", "stream"])
@pytest.mark.parametrize("bad", BAD_ON_BOTH + BAD_ON_GRPC, ids=case_name)
async def test_grpc_refuses_bad_request_with_status_and_field(
    front: FrontendHarness, bad: BadRequestCase, streaming: bool
) -> None:
    before = len(front.refused_codes)
    code, trailing, details = await grpc_refusal(front, grpc_request(bad.body), streaming)
    assert (
        code
        is {400: grpc.StatusCode.INVALID_ARGUMENT, 404: grpc.StatusCode.NOT_FOUND}[
            bad.expected_status
        ]
    )
    assert trailing.get("baton-error-code") == bad.expected_code
    assert trailing.get("baton-error-param") == bad.expected_param
    assert bad.expected_message in details
    assert front.backend.requests == []
    assert front.refused_codes[before:] == [bad.expected_code]


async def test_grpc_refuses_unknown_fields(front: FrontendHarness) -> None:
    raw = grpc_request(GOOD_BODY).SerializeToString() + bytes(
        [(99 << 3 & 0x7F) | 0x80, 99 << 3 >> 7, 5]
    )
    code, trailing, details = await grpc_refusal(
        front, pb.GenerateRequest.FromString(raw), streaming=False
    )
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing["baton-error-param"] == "99"
    assert "field number 99" in details


async def test_grpc_bounds_the_size_of_a_message(front: FrontendHarness) -> None:
    request = pb.GenerateRequest(text="x" * (MAX_BODY_BYTES + 1))
    code, _, _ = await grpc_refusal(front, request, streaming=False)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert front.backend.requests == []


async def test_unsupported_fields_may_be_null_or_default(front: FrontendHarness) -> None:
    nothing = [
        "n",
        "first_choice",
        "best_of",
        "echo",
        "logprobs",
        "prompt_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stop",
    ]
    nothing += [
        "suffix",
        "user",
        "stream_options",
        "min_p",
        "repetition_penalty",
        "priority",
        "max_tokens",
    ]
    nothing += ["model"]
    nothing += [
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "stream",
    ]
    defaults = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
    }
    defaults |= {"stop": [], "user": "me", "min_p": 0.0, "repetition_penalty": 1.0, "priority": 0}
    for fields in (dict.fromkeys([*nothing, "return_token_ids"]), defaults):
        response = await front.http.post("/v1/completions", json=GOOD_BODY | fields)
        assert response.status_code == 200, response.text
    assert front.backend.requests[0].sampling.max_tokens == 16
    front.backend.requests.clear()


def grpc_request(body: dict[str, Any] | bytes) -> pb.GenerateRequest:
    assert isinstance(body, dict)
    fields = dict(body)
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt is not None:
        fields["token_ids"] = {"ids": prompt}
    return pb.GenerateRequest(**fields)


async def grpc_refusal(
    front: FrontendHarness, request: pb.GenerateRequest, streaming: bool
) -> tuple[grpc.StatusCode, dict[str, str], str]:
    error = await await_grpc_error(
        (front.stub.Generate if streaming else front.stub.GenerateOnce)(request)
    )
    return error.code(), dict(error.trailing_metadata()), error.details()
