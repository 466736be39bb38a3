"""Requests to upgrade to another protocol are answered like any other, as Java's HTTP client
expects: it asks for h2c with the first request of a connection."""

import asyncio

import pytest

from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    COMPLETIONS_HEAD,
    FrontendHarness,
    finished_event,
    running_frontend,
)

UPGRADE_HEAD = (
    COMPLETIONS_HEAD
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
)
BODY = b'{"prompt": [1], "max_tokens": 2, "return_token_ids": true}'
NEXT = b"GET /v1/models/next HTTP/1.1\r\nhost: x\r\n\r\n"


def answer_with_length_limit(front: FrontendHarness) -> None:
    front.backend.script = lambda generation: generation.emit_events(
        TokensEvent((generation.request.sampling.max_tokens,)), finished_event()
    )


def with_length(body: bytes) -> bytes:
    return UPGRADE_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def in_chunks(body: bytes) -> bytes:
    parts = (body[:7], body[7:], b"")
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return UPGRADE_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks


@pytest.mark.parametrize("sent_at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize("request_bytes", [with_length(BODY), in_chunks(BODY)])
async def test_body_and_the_next_request_are_read(request_bytes: bytes, sent_at_once: int) -> None:
    async with running_frontend() as front:
        answer_with_length_limit(front)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        async with asyncio.timeout(30):
            sent = request_bytes + NEXT
            for start in range(0, len(sent), sent_at_once):
                writer.write(sent[start : start + sent_at_once])
                await writer.drain()
            answer = await reader.readuntil(b'"token_ids":[2]')
            assert answer.startswith(b"HTTP/1.1 200 OK")
            answer = await reader.readuntil(b"model_not_found")
            assert answer.count(b"HTTP/1.1") == 1
        writer.close()


async def test_several_of_them_may_arrive_together() -> None:
    async with running_frontend() as front:
        answer_with_length_limit(front)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        async with asyncio.timeout(30):
            writer.write(with_length(BODY) + in_chunks(BODY) + with_length(BODY) + NEXT)
            for _ in range(3):
                answer = await reader.readuntil(b'"token_ids":[2]')
                assert answer.count(b"HTTP/1.1 200 OK") == 1
            await reader.readuntil(b"model_not_found")
        writer.close()


async def test_body_is_not_read_as_a_request() -> None:
    async with running_frontend() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        async with asyncio.timeout(30):
            writer.write(with_length(NEXT) + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await reader.readuntil(b'{"version"')
            assert answer.startswith(b"HTTP/1.1 400 Bad Request")  # it is no JSON
            assert answer.count(b"HTTP/1.1") == 2
            assert b"model_not_found" not in answer
        writer.close()


@pytest.mark.parametrize("target", [b"/version", b"x:80"])
async def test_tunnel_is_refused(target: bytes) -> None:
    async with running_frontend() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        async with asyncio.timeout(30):
            writer.write(b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n" + NEXT)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 Bad Request")
            assert answer.count(b"HTTP/1.1") == 1
        writer.close()
