"""Errors that are not the caller's, before and after the first byte, over both front doors."""

import asyncio
import json
from typing import Any

import grpc.aio
import httpx2
import pytest

from baton import errors
from baton.errors import BatonError
from baton.pb import generation_pb2 as pb
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    COMPLETIONS_HEAD,
    FakeGeneration,
    FrontendHarness,
    await_grpc_error,
    overloaded_error,
    running_frontend,
)

CANARY = "canary-sings-at-dawn"
ASK = pb.GenerateRequest(token_ids={"ids": [1]})


async def post(front: FrontendHarness, **fields: Any) -> httpx2.Response:
    return await front.http.post("/v1/completions", json={"prompt": [1], **fields})


async def grpc_status(
    front: FrontendHarness, method: str, request: pb.GenerateRequest = ASK
) -> grpc.aio.AioRpcError:
    return await await_grpc_error(getattr(front.stub, method)(request))


REFUSALS = [
    (overloaded_error(), 429, "rate_limit_error", "overloaded", "3", "RESOURCE_EXHAUSTED"),
    (
        errors.ShuttingDown("stopping", retry_after=0.1),
        503,
        "server_error",
        "draining",
        "1",
        "UNAVAILABLE",
    ),
    (
        errors.ServiceUnavailable("no decode node", retry_after=1),
        503,
        "server_error",
        "unavailable",
        "1",
        "UNAVAILABLE",
    ),
    (errors.NodeLost("node d0 is gone"), 503, "server_error", "node_gone", None, "UNAVAILABLE"),
    (
        errors.DeadlineExceeded("too late"),
        504,
        "timeout_error",
        "deadline_exceeded",
        None,
        "DEADLINE_EXCEEDED",
    ),
    (ZeroDivisionError(CANARY), 500, "server_error", "internal_error", None, "INTERNAL"),
]


@pytest.mark.parametrize("stage", ["submit", "first event"])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry", "grpc_code"), REFUSALS, ids=lambda x: str(x)[:20]
)
async def test_error_before_the_first_byte_has_its_status(
    error: Exception,
    status: int,
    kind: str,
    code: str,
    retry: str | None,
    grpc_code: str,
    stage: str,
) -> None:
    async with running_frontend() as front:
        if stage == "submit":
            front.backend.refusal = error
        else:
            front.backend.script = lambda generation: generation.emit_events(error)
        for stream in (False, True):
            response = await post(front, stream=stream)
            assert response.status_code == status
            shown = response.json()["error"]
            assert (shown["type"], shown["code"], shown["param"]) == (kind, code, None)
            assert response.headers.get("retry-after") == retry
            assert ("x-baton-request-id" in response.headers) == (stage == "first event")
            assert CANARY not in response.text
        for method in ("Generate", "GenerateOnce"):
            failed = await grpc_status(front, method)
            trailing = dict(failed.trailing_metadata())
            assert failed.code().name == grpc_code
            assert (trailing["baton-error-code"], trailing.get("retry-after")) == (code, retry)
            assert CANARY not in failed.details()
        assert front.refused_codes == []  # the brain counts its own


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NodeLost("gone"), "node_gone"),
        (errors.ShuttingDown("stop"), "draining"),
        (KeyError(CANARY), "internal_error"),
    ],
)
async def test_error_after_the_first_byte_is_an_error_event(error: Exception, code: str) -> None:
    async with running_frontend() as front:
        front.backend.script = lambda generation: generation.emit_events(TokensEvent((1,)), error)
        response = await post(front, stream=True)
        assert response.status_code == 200
        first, last = (json.loads(line[6:]) for line in response.text.split("\n\n") if line)
        assert first["choices"][0]["finish_reason"] is None
        assert last["error"]["code"] == code
        assert "[DONE]" not in response.text
        assert CANARY not in response.text
        whole = await post(front)
        assert (whole.status_code, whole.json()["error"]["code"]) == (
            error.http_status if isinstance(error, BatonError) else 500,
            code,
        )
        assert (
            dict((await grpc_status(front, "Generate")).trailing_metadata())["baton-error-code"]
            == code
        )


async def test_an_error_event_closes_the_connection() -> None:
    async with running_frontend() as front:
        front.backend.script = lambda generation: generation.emit_events(
            TokensEvent((1,)), errors.NodeLost("gone")
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        body = b'{"prompt": [1], "stream": true}'
        writer.write(COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            received = await reader.read()  # until the end of the connection
        assert received.endswith(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


async def test_requests_without_nodes_are_unavailable() -> None:
    async with running_frontend() as front:
        front.backend.has_no_nodes = True
        for response in (await post(front), await front.http.get("/v1/models")):
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.json()["error"]["code"] == "unavailable"


async def test_prompts_and_outputs_are_never_logged(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever goes wrong, and whatever the exception quotes."""

    def explode(generation: FakeGeneration) -> None:
        generation.emit_events(TokensEvent((77777,)), RuntimeError(f"prompt was {CANARY}"))

    async with running_frontend() as front:
        await post(front, prompt=CANARY)
        await post(front, prompt=[CANARY])
        await post(front, **{CANARY: 1})
        await post(front, stop=CANARY)
        await front.http.post("/v1/completions", content=f'{{"prompt": "{CANARY}"')
        front.backend.script = explode
        for stream in (True, False):
            await post(front, stream=stream)
        await grpc_status(front, "Generate")
        await grpc_status(front, "GenerateOnce", pb.GenerateRequest(text=CANARY))
        front.backend.refusal = ValueError(CANARY)
        await post(front)
        await grpc_status(front, "GenerateOnce")
    captured = capfd.readouterr()
    logged = captured.out + captured.err
    assert "internal error" in logged
    assert "KeyError" not in logged
    assert CANARY not in logged
    assert "77777" not in logged


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),  # no redirect: clients drop the body on one
        ("GET", "/v1/completions", 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_are_not_found(method: str, path: str, status: int, code: str) -> None:
    async with running_frontend() as front:
        response = await front.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
