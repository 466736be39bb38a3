"""The coordinator's brain and its node link, over real gRPC on loopback, against scripted nodes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton import link_codec
from baton.config import Config
from baton.limits import LINK_OPTIONS
from baton.types import FinishReason, SamplingParams
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Delta, Done, Submission
from coordinator.ledgers import Ledgers
from coordinator.node_link import NodeLink
from coordinator.stream import Stream
from tests.fakes import FakeNode, FakePlane, expected_tokens, serve_decode, serve_prefill


class Cluster:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.dispatcher = Dispatcher(config)
        self.ledgers = Ledgers(self.dispatcher)
        self.plane = FakePlane()
        self.address = ""

    def node(self, name: str, role: str, **fields: Any) -> FakeNode:
        return FakeNode(self.address, name, role, **fields)

    async def generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], Done]:
        return await collect(await self.submit(prompt, max_tokens))

    async def submit(self, prompt: tuple[int, ...], max_tokens: int, seconds: float = 10.0) -> Stream:
        return await self.dispatcher.submit(Submission(prompt, SamplingParams(max_tokens), seconds))


async def collect(stream: Stream) -> tuple[tuple[int, ...], Done]:
    tokens: list[int] = []
    done: Done | None = None
    async for event in stream:
        match event:
            case Delta(fresh):
                tokens += fresh
            case Done():
                done = event
    assert done is not None
    return tuple(tokens), done


@asynccontextmanager
async def cluster(**fields: Any) -> AsyncIterator[Cluster]:
    it = Cluster(Config(**fields))
    server = grpc.aio.server(options=LINK_OPTIONS)
    link_codec.add_to(server, NodeLink(it.config, it.dispatcher, it.ledgers).Attach)
    it.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield it
    finally:
        it.dispatcher.close()
        await server.stop(grace=0.2)


async def test_a_request_goes_through_both_nodes() -> None:
    async with cluster() as it, it.node("p0", "prefill") as prefill, it.node("d0", "decode") as decode:
        prefill.run(serve_prefill(prefill, it.plane))
        decode.run(serve_decode(decode, it.plane))
        prompt = tuple(range(1, 40))
        tokens, done = await it.generate(prompt, 10)
        assert tokens == expected_tokens(prompt, 10)
        assert done.reason is FinishReason.LENGTH
        timeline = done.timeline
        assert (timeline.prefill_node, timeline.decode_node, timeline.attempts) == ("p0", "d0", 1)
        assert timeline.handoff.bytes == 4096
        stages = (timeline.queue, timeline.reserve, timeline.prefill, timeline.transfer, timeline.first_token)
        assert sum(stages) == timeline.ttft
        assert it.dispatcher.brain.counters.prompt_tokens == {
            "computed_prefill": 39,
            "computed_decode": 0,
            "local_cache": 0,
            "pool": 0,
        }
