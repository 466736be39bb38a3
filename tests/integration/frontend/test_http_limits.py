"""Bounds on what a client can make the HTTP front door hold: bodies, heads, unread output, time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import cast
from unittest.mock import Mock

import pytest

from baton.limits import MAX_BODY_BYTES
from baton.pb import generation_pb2 as pb
from coordinator.frontend.http import generation_endpoints
from coordinator.frontend.http.server import bounded_protocol
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    BUFFERED_EVENTS,
    COMPLETIONS_HEAD,
    FakeGeneration,
    FrontendHarness,
    await_grpc_error,
    finished_event,
    open_raw_post,
    running_frontend,
)


async def exchange_bytes(front: FrontendHarness, *parts: bytes) -> bytes:
    """Everything that comes back on a connection that sends `parts` and says no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
    async with asyncio.timeout(30):
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.readuntil(b"}}")
        finally:
            writer.close()


def error_of(response: bytes) -> tuple[bytes, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return head.split()[1], json.loads(body)["error"]["code"]


async def test_too_large_content_length_is_refused_before_the_body() -> None:
    async with running_frontend() as front:
        head = COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
        assert error_of(await exchange_bytes(front, head)) == (b"413", "request_too_large")


async def test_too_large_chunked_body_is_refused_while_it_is_read() -> None:
    async with running_frontend() as front:
        head = COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n"
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        assert error_of(await exchange_bytes(front, head, *[chunk] * 4, b"1\r\n \r\n")) == (
            b"413",
            "request_too_large",
        )
        assert front.refused_codes == ["request_too_large"]


async def test_body_of_the_maximum_size_is_accepted() -> None:
    async with running_frontend() as front:
        body = b'{"prompt": [1]' + b" " * (MAX_BODY_BYTES - 15) + b"}"
        assert (await front.http.post("/v1/completions", content=body)).status_code == 200
        assert (await front.http.post("/v1/completions", content=body + b" ")).status_code == 413


async def test_an_endless_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "MAX_DROPPED_BYTES", 6 << 20)
    async with running_frontend() as front:
        _, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        writer.write(COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(chunk)
                await writer.drain()
            raise AssertionError("64 MiB were taken")
        writer.close()
        assert front.refused_codes == ["request_too_large"]


@pytest.mark.parametrize("ended", [True, False])
async def test_request_head_is_bounded(ended: bool) -> None:
    async with running_frontend() as front:
        start = b"GET /health HTTP/1.1\r\nhost: x\r\nx-filler: "
        fillers = [b"y" * (40 << 10)] * 8
        response = (
            await exchange_bytes(front, start, *fillers)
            if not ended
            else await exchange_bytes(front, start, *fillers, b"\r\n\r\n")
        )
        assert error_of(response) == (b"400", "invalid_request")


REQUEST_HEAD = b"GET /version HTTP/1.1\r\nhost: x\r\nx-filler: "


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_request_head_is_bounded_before_parsing(before: bytes, beyond: int) -> None:
    """However many bytes come at once, the parser gets no more of a head than the bound."""
    filler = b"y" * (bounded_protocol.MAX_HEAD_BYTES - len(REQUEST_HEAD) - 4 + beyond)
    async with running_frontend() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        async with asyncio.timeout(30):
            if before:
                writer.write(before)
                await reader.readuntil(b'"}')
            writer.write(REQUEST_HEAD + filler + b"\r\n\r\n")
            status = (await reader.readline()).split()[1]
        writer.close()
        assert status == (b"400" if beyond else b"200")


def test_a_long_head_in_one_piece_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the event loop hands over what it has read: up to 256 KiB."""
    fed: list[int] = []
    bounded = bounded_protocol.BoundedHttpProtocol.__new__(bounded_protocol.BoundedHttpProtocol)
    monkeypatch.setattr(
        bounded_protocol.BoundedHttpProtocol, "_parse", lambda _, data: fed.append(len(data))
    )
    refused: list[str] = []
    monkeypatch.setattr(
        bounded_protocol.BoundedHttpProtocol,
        "send_400_response",
        lambda _, reason: refused.append(reason),
    )
    bounded.transport = Mock(is_closing=lambda: False)
    bounded._in_head, bounded._head_bytes = True, 0
    bounded.data_received(b"y" * (256 << 10))
    assert sum(fed) == bounded_protocol.MAX_HEAD_BYTES
    assert len(refused) == 1


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_non_http_bytes_get_a_json_error(garbage: bytes) -> None:
    async with running_frontend() as front:
        assert error_of(await exchange_bytes(front, garbage)) == (b"400", "invalid_request")


async def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_TIMEOUT_SECONDS", 0.05)
    async with running_frontend() as front:
        for first in (b"", b"GET /hea", b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
            writer.write(first)
            async with asyncio.timeout(30):
                assert (await reader.read()).count(b" 200 OK") == first.count(b"/version")
            writer.close()


async def test_a_slow_reader_is_cut_off_with_an_error() -> None:
    """Its backlog stays in the generation's bounded buffer, not in ours; what it had coming still
    comes first."""
    async with running_frontend() as front:
        front.backend.script = lambda generation: None
        reader, writer = await open_raw_post(
            front, {"prompt": [1], "stream": True, "return_token_ids": True}, receive_buffer=8 << 10
        )
        transport = cast(asyncio.Transport, writer.transport)
        transport.pause_reading()
        generation = await front.backend.generations.get()
        given = await fill_buffer(generation)
        assert (
            given < 20_000
        )  # steps of about 250 bytes: kernel buffers, one transport buffer, one bounded queue
        transport.resume_reading()
        async with asyncio.timeout(30):
            received = await reader.read()
        writer.close()
    assert b"slow_reader" in received
    assert b"[DONE]" not in received
    tokens = [
        token
        for line in received.split(b"\n")
        if line.startswith(b'data: {"id"')
        for token in json.loads(line[6:])["choices"][0]["token_ids"]
    ]
    assert tokens == list(range(len(tokens)))
    assert len(tokens) >= BUFFERED_EVENTS


async def fill_buffer(generation: FakeGeneration) -> int:
    """Generate for as long as somebody takes it."""
    given = 0
    while not generation.is_ended:
        generation.emit_events(TokensEvent((given,)))
        given += 1
        await asyncio.sleep(0)
    return given


@pytest.mark.parametrize("told", ["0", "-1", "nan", "inf", "soon", ""])
async def test_invalid_deadline_is_refused(told: str) -> None:
    async with running_frontend() as front:
        headers = {"x-request-timeout": told}
        response = await front.http.post("/v1/completions", json={"prompt": [1]}, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-request-timeout"


@pytest.mark.parametrize(("told", "most"), [(None, 60.0), ("2.5", 2.5), ("1e6", 60.0)])
async def test_deadline_reaches_the_backend(told: str | None, most: float) -> None:
    async with running_frontend(longest=60.0) as front:
        headers = {"x-request-timeout": told} if told else {}
        await front.http.post("/v1/completions", json={"prompt": [1]}, headers=headers)
        assert most - 1 < front.backend.requests[0].timeout_seconds <= most


async def test_incomplete_body_ends_at_the_deadline() -> None:
    async with running_frontend() as front:
        head = COMPLETIONS_HEAD + b"x-request-timeout: 0.05\r\ncontent-length: 9\r\n\r\n{"
        assert error_of(await exchange_bytes(front, head)) == (b"504", "deadline_exceeded")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running_frontend() as front:
        front.backend.script = lambda generation: generation.emit_events(
            TokensEvent((generation.request.sampling.max_tokens,)), finished_event()
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        for wanted in (2, 3):
            body = b'{"prompt": [1], "return_token_ids": true, "max_tokens": %d}' % wanted
            writer.write(COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        first, second = (
            await reader.readuntil(b'"token_ids":[2]'),
            await reader.readuntil(b'"token_ids":[3]'),
        )
        assert (first.count(b"200 OK"), second.count(b"200 OK")) == (1, 1)
        writer.close()


async def test_a_slow_grpc_reader_is_cut_off_with_an_error() -> None:
    async with running_frontend() as front:
        front.backend.script = lambda generation: None
        call = front.stub.Generate(pb.GenerateRequest(token_ids={"ids": [1]}))
        generation = await front.backend.generations.get()
        given = await fill_buffer(generation)
        assert given < 20_000
        tokens: list[int] = []

        async def read() -> None:
            async for part in call:
                tokens.extend(part.token_ids)

        error = await await_grpc_error(read())
        assert dict(error.trailing_metadata())["baton-error-code"] == "slow_reader"
        assert tokens == list(range(len(tokens)))
        assert len(tokens) >= BUFFERED_EVENTS


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
async def test_text_requests_are_unavailable_while_the_tokenizer_loads(path: str) -> None:
    bodies: dict[str, object] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/detokenize": {"tokens": [1]},
    }
    async with running_frontend(loading=True) as front:
        answer = await front.http.post(path, json=bodies.get(path, {"prompt": "a"}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "tokenizer" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"
        error = await await_grpc_error(
            front.stub.GenerateOnce(pb.GenerateRequest(text="a"), timeout=60)
        )
        assert dict(error.trailing_metadata())["baton-error-code"] == "unavailable"


async def test_waiting_for_a_thread_to_decode_counts_against_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    @contextlib.asynccontextmanager
    async def arriving(*_: object) -> AsyncIterator[bytes]:
        nonlocal now
        now += 1.0
        yield b""

    async def decode_and_apply(
        body: bytes, workers: object, then: Callable[[bytes], float]
    ) -> float:
        nonlocal now
        now += 10.0
        return then(body)

    monkeypatch.setattr(generation_endpoints, "monotonic_clock", lambda: now)
    monkeypatch.setattr(generation_endpoints, "receive_body", arriving)
    request, intake, decoder = Mock(headers={}), Mock(), Mock(decode_and_apply=decode_and_apply)
    intake.effective_timeout.return_value = 60.0
    assert (
        await generation_endpoints.read_body(request, intake, decoder, lambda _, left: left) == 49.0
    )
