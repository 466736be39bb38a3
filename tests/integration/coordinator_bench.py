"""A coordinator without front doors: brain, dispatcher, node link and Cluster service on loopback ports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.config import Config
from baton.connection_limits import port_limit
from baton.descriptors import descriptor_limit
from baton.pb import cluster_pb2
from baton.types import SamplingParams
from coordinator.cluster_service import ClusterService
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Delta, Done, Submission
from coordinator.grpc_handlers import add_handlers
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.node_port import NodePort
from coordinator.stream import Stream
from coordinator.warmup import Readiness
from tests.fakes import FakeNode, FakePlane, serve_decode, serve_prefill


class Bench:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.dispatcher = Dispatcher(config)
        self.ledgers = Ledgers(self.dispatcher)
        self.metrics = Metrics(self.dispatcher)
        self.readiness = Readiness(config, self.dispatcher)
        self.service = ClusterService(config, self.dispatcher, self.ledgers, self.readiness, self.metrics)
        self.plane = FakePlane()
        self.address = ""  # of the cluster port
        self.operators = ""  # where Cluster answers
        self._changed = asyncio.Event()
        self.dispatcher.on_change.append(self._changed.set)
        self.readiness.on_change.append(lambda ready, reason: self._changed.set())

    async def until(self, condition: Callable[[], bool], patience: float = 30.0) -> None:
        """Wait for something that a node's coming, going or reporting brings about."""
        async with asyncio.timeout(patience):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def node(self, name: str, role: str, **fields: Any) -> FakeNode:
        """One that does nothing by itself."""
        return FakeNode(self.address, name, role, **fields)

    @asynccontextmanager
    async def working(self, *names: str, **script: Any) -> AsyncIterator[list[FakeNode]]:
        """Nodes that serve: prefill where the name starts with p, else decode."""
        nodes = [self.node(name, "prefill" if name.startswith("p") else "decode") for name in names]
        try:
            for node in nodes:
                await node.join()
                is_prefill = node.role == "prefill"
                node.run(serve_prefill(node, self.plane) if is_prefill else serve_decode(node, self.plane, **script))
            yield nodes
        finally:
            for node in nodes:
                await node.die()

    async def submit(self, prompt: tuple[int, ...], max_tokens: int, seconds: float = 60.0) -> Stream:
        return await self.dispatcher.submit(Submission(prompt, SamplingParams(max_tokens), seconds))

    async def generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], Done]:
        return await collect(await self.submit(prompt, max_tokens))


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
async def coordinator(**fields: Any) -> AsyncIterator[Bench]:
    """Scripted nodes say nothing by themselves, and nobody minds unless `silence` is given."""
    bench = Bench(Config(**{"silence": 100.0, **fields}))
    nodes = NodePort(bench.config, bench.dispatcher, bench.ledgers, port_limit("cluster", descriptor_limit()))
    server = grpc.aio.server()
    add_handlers(server, cluster_pb2.DESCRIPTOR.services_by_name["Cluster"], bench.service)
    bench.address = f"127.0.0.1:{nodes.port}"
    bench.operators = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await nodes.start()
    await server.start()
    try:
        yield bench
    finally:
        bench.dispatcher.close()
        await nodes.stop(grace=0.2)
        await server.stop(grace=0.2)
