"""A client that goes away, in every phase of its request, over every kind of call: the work behind
it is cancelled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import grpc
import pytest

from baton.pb import generation_pb2 as pb
from coordinator.generation import TokensEvent
from tests.integration.frontend.frontend_harness import (
    COMPLETIONS_HEAD,
    FakeGeneration,
    FrontendHarness,
    GatedText,
    await_grpc_error,
    finished_event,
    open_raw_post,
    running_frontend,
)

CALLS = ["http once", "http stream", "grpc once", "grpc stream"]


class DisconnectPhase(Enum):
    """Where the request is when its client leaves."""

    TOKENIZING = "the prompt is being tokenized"
    SUBMITTING = "the brain has not admitted it"
    QUEUED = "admitted, nothing generated"
    RUNNING = "some tokens are out"


@asynccontextmanager
async def open_call(front: FrontendHarness, kind: str) -> AsyncIterator[Any]:
    """A request whose client leaves at the end of the block. Yields an awaitable for its first byte
    or message."""
    if kind.startswith("http"):
        reader, writer = await open_raw_post(
            front, {"prompt": "hello", "stream": kind == "http stream"}
        )
        yield lambda: reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        return
    request = pb.GenerateRequest(text="hello")
    rpc = (
        front.stub.Generate(request) if kind == "grpc stream" else front.stub.GenerateOnce(request)
    )
    waiting = asyncio.ensure_future(rpc.read() if kind == "grpc stream" else rpc)
    yield lambda: waiting
    rpc.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def generate_nothing(generation: FakeGeneration) -> None:
    """A script that generates nothing by itself."""


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("phase", list(DisconnectPhase), ids=lambda phase: phase.name.lower())
async def test_client_disconnect_cancels_the_request(kind: str, phase: DisconnectPhase) -> None:
    text = GatedText()
    text.gate.set()
    async with running_frontend(text=text) as front:
        front.backend.script = generate_nothing
        if phase is DisconnectPhase.TOKENIZING:
            text.gate.clear()
        elif phase is DisconnectPhase.SUBMITTING:
            front.backend.submit_gate.clear()
        async with open_call(front, kind) as first:
            await text.encode_started.wait()
            if phase is DisconnectPhase.SUBMITTING:
                await front.backend.submit_started.wait()
            elif phase in (DisconnectPhase.QUEUED, DisconnectPhase.RUNNING):
                generation = await front.backend.generations.get()
            if phase is DisconnectPhase.RUNNING:
                generation.emit_events(TokensEvent((1,)), TokensEvent((2,)))
                if "stream" in kind:
                    await first()
        async with asyncio.timeout(30):
            match phase:
                case DisconnectPhase.TOKENIZING:
                    await text.encode_cancelled.wait()
                case DisconnectPhase.SUBMITTING:
                    await front.backend.submit_cancelled.wait()
                case _:
                    await generation.cancelled.wait()
        assert len(front.backend.requests) == (phase is not DisconnectPhase.TOKENIZING)


async def test_disconnect_before_the_body_is_complete() -> None:
    async with running_frontend() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        writer.write(COMPLETIONS_HEAD + b"content-length: 100\r\n\r\n{")
        writer.close()
        assert (await front.http.post("/v1/completions", json={"prompt": [1]})).status_code == 200
        assert len(front.backend.requests) == 1
        await writer.wait_closed()
        assert await reader.read() == b""


@pytest.mark.parametrize("kind", CALLS)
async def test_a_finished_request_is_not_cancelled(kind: str) -> None:
    text = GatedText()
    text.gate.set()
    async with running_frontend(text=text) as front:
        front.backend.script = generate_nothing
        async with open_call(front, kind) as first:
            generation = await front.backend.generations.get()
            generation.emit_events(TokensEvent((1,)), finished_event())
            if kind != "http once":
                await first()
        assert not generation.cancelled.is_set()


async def test_grpc_deadline_cancels_the_request() -> None:
    async with running_frontend() as front:
        front.backend.script = generate_nothing
        request = pb.GenerateRequest(token_ids={"ids": [1]})
        calls = [
            method(request, timeout=5.0)
            for method in (front.stub.Generate, front.stub.GenerateOnce)
        ]
        for _ in calls:
            generation = await front.backend.generations.get()
            assert 0 < generation.request.timeout_seconds <= 5.2, "gRPC rounds up on the wire"
            async with asyncio.timeout(30):
                await generation.cancelled.wait()
        for call in calls:
            assert (await await_grpc_error(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
