"""A client that goes away, in every phase of its request, over every kind of call: the work behind it is cancelled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import grpc
import pytest

from baton.pb import generation_pb2 as pb
from coordinator.generation import Delta
from tests.integration.front_fixtures import (
    COMPLETIONS,
    FakeGeneration,
    Front,
    GatedText,
    done,
    grpc_error,
    raw_post,
    serving,
)

CALLS = ["http once", "http stream", "grpc once", "grpc stream"]


class Phase(Enum):
    """Where the request is when its client leaves."""

    TOKENIZING = "the prompt is being tokenized"
    SUBMITTING = "the brain has not admitted it"
    QUEUED = "admitted, nothing generated"
    RUNNING = "some tokens are out"


@asynccontextmanager
async def call(front: Front, kind: str) -> AsyncIterator[Any]:
    """A request whose client leaves at the end of the block. Yields an awaitable for its first byte or message."""
    if kind.startswith("http"):
        reader, writer = await raw_post(front, {"prompt": "hello", "stream": kind == "http stream"})
        yield lambda: reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        return
    request = pb.GenerateRequest(text="hello")
    rpc = front.stub.Generate(request) if kind == "grpc stream" else front.stub.GenerateOnce(request)
    waiting = asyncio.ensure_future(rpc.read() if kind == "grpc stream" else rpc)
    yield lambda: waiting
    rpc.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def nothing(generation: FakeGeneration) -> None:
    """A script that generates nothing by itself."""


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name.lower())
async def test_leaving(kind: str, phase: Phase) -> None:
    text = GatedText()
    text.gate.set()
    async with serving(text=text) as front:
        front.brain.script = nothing
        if phase is Phase.TOKENIZING:
            text.gate.clear()
        elif phase is Phase.SUBMITTING:
            front.brain.gate.clear()
        async with call(front, kind) as first:
            await text.asked.wait()
            if phase is Phase.SUBMITTING:
                await front.brain.waiting.wait()
            elif phase in (Phase.QUEUED, Phase.RUNNING):
                generation = await front.brain.generations.get()
            if phase is Phase.RUNNING:
                generation.give(Delta((1,)), Delta((2,)))
                if "stream" in kind:
                    await first()
        async with asyncio.timeout(30):
            match phase:
                case Phase.TOKENIZING:
                    await text.abandoned.wait()
                case Phase.SUBMITTING:
                    await front.brain.abandoned.wait()
                case _:
                    await generation.cancelled.wait()
        assert len(front.brain.submissions) == (phase is not Phase.TOKENIZING)


async def test_leaving_before_the_body_is_complete() -> None:
    async with serving() as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.http_port)
        writer.write(COMPLETIONS + b"content-length: 100\r\n\r\n{")
        writer.close()
        assert (await front.http.post("/v1/completions", json={"prompt": [1]})).status_code == 200
        assert len(front.brain.submissions) == 1
        await writer.wait_closed()
        assert await reader.read() == b""


@pytest.mark.parametrize("kind", CALLS)
async def test_a_finished_request_is_not_cancelled(kind: str) -> None:
    text = GatedText()
    text.gate.set()
    async with serving(text=text) as front:
        front.brain.script = nothing
        async with call(front, kind) as first:
            generation = await front.brain.generations.get()
            generation.give(Delta((1,)), done())
            if kind != "http once":
                await first()
        assert not generation.cancelled.is_set()


async def test_a_grpc_deadline_cancels() -> None:
    async with serving() as front:
        front.brain.script = nothing
        request = pb.GenerateRequest(token_ids={"ids": [1]})
        calls = [method(request, timeout=5.0) for method in (front.stub.Generate, front.stub.GenerateOnce)]
        for _ in calls:
            generation = await front.brain.generations.get()
            assert 0 < generation.submission.timeout <= 5.2, "gRPC rounds up on the wire"
            async with asyncio.timeout(30):
                await generation.cancelled.wait()
        for call in calls:
            assert (await grpc_error(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
