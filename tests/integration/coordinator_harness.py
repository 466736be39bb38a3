"""A coordinator without front doors: brain, dispatcher, node link and Cluster service on loopback
ports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.config.settings import Config
from baton.network.connection_limits import compute_port_limit
from baton.pb import cluster_pb2
from baton.process.descriptors import get_descriptor_limit
from baton.types import SamplingParams
from coordinator.frontend.grpc.handlers import add_service_handlers
from coordinator.generation import FinishedEvent, TokensEvent
from coordinator.node_links.cluster_readiness import ClusterReadiness
from coordinator.node_links.dispatcher import Dispatcher, GenerationStream
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.node_links.node_link_server import NodeLinkServer
from coordinator.operators.cluster_operations import ClusterOperations
from coordinator.operators.cluster_service import ClusterService
from coordinator.operators.metrics import CoordinatorMetrics
from tests.fake_nodes import FakeNode, FakeTransferPlane, serve_decode, serve_prefill
from tests.new_requests import make_request


class CoordinatorHarness:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.dispatcher = Dispatcher(config)
        self.ledgers = LedgerCollector(self.dispatcher)
        self.metrics = CoordinatorMetrics(self.dispatcher)
        self.readiness = ClusterReadiness(config, self.dispatcher)
        self.operations = ClusterOperations(
            config, self.dispatcher, self.ledgers, self.readiness, self.metrics
        )
        self.service = ClusterService(self.operations, config.admin_token)
        self.transfer_plane = FakeTransferPlane()
        self.cluster_port_address = ""  # of the cluster port
        self.cluster_service_address = ""  # where Cluster answers
        self._changed = asyncio.Event()
        self.dispatcher.on_cluster_change.append(self._changed.set)
        self.readiness.on_change.append(lambda ready, reason: self._changed.set())

    async def wait_until(self, condition: Callable[[], bool], patience: float = 30.0) -> None:
        """Wait for something that a node's coming, going or reporting brings about."""
        async with asyncio.timeout(patience):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def make_node(self, name: str, role: str, **fields: Any) -> FakeNode:
        """One that does nothing by itself."""
        return FakeNode(self.cluster_port_address, name, role, **fields)

    @asynccontextmanager
    async def run_nodes(self, *names: str, **script: Any) -> AsyncIterator[list[FakeNode]]:
        """Nodes that serve: prefill where the name starts with p, else decode."""
        nodes = [
            self.make_node(name, "prefill" if name.startswith("p") else "decode") for name in names
        ]
        try:
            for node in nodes:
                await node.join()
                is_prefill = node.role == "prefill"
                node.run_script(
                    serve_prefill(node, self.transfer_plane)
                    if is_prefill
                    else serve_decode(node, self.transfer_plane, **script)
                )
            yield nodes
        finally:
            for node in nodes:
                await node.drop_connection()

    async def submit_request(
        self, prompt: tuple[int, ...], max_tokens: int, seconds: float = 60.0
    ) -> GenerationStream:
        return await self.dispatcher.submit_request(
            make_request(prompt, SamplingParams(max_tokens), seconds)
        )

    async def generate(
        self, prompt: tuple[int, ...], max_tokens: int
    ) -> tuple[tuple[int, ...], FinishedEvent]:
        return await collect_stream(await self.submit_request(prompt, max_tokens))


async def collect_stream(stream: GenerationStream) -> tuple[tuple[int, ...], FinishedEvent]:
    tokens: list[int] = []
    done: FinishedEvent | None = None
    async for event in stream:
        match event:
            case TokensEvent(fresh):
                tokens += fresh
            case FinishedEvent():
                done = event
    assert done is not None
    return tuple(tokens), done


@asynccontextmanager
async def running_coordinator(**fields: Any) -> AsyncIterator[CoordinatorHarness]:
    """Scripted nodes say nothing by themselves, and nobody minds unless `silence` is given."""
    bench = CoordinatorHarness(Config(**{"silence": 100.0, **fields}))
    nodes = NodeLinkServer(
        bench.config,
        bench.dispatcher,
        bench.ledgers,
        compute_port_limit("cluster", get_descriptor_limit()),
    )
    server = grpc.aio.server()
    add_service_handlers(server, cluster_pb2.DESCRIPTOR.services_by_name["Cluster"], bench.service)
    bench.cluster_port_address = f"127.0.0.1:{nodes.port}"
    bench.cluster_service_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await nodes.start()
    await server.start()
    try:
        yield bench
    finally:
        bench.dispatcher.close()
        await nodes.stop(grace=0.2)
        await server.stop(grace=0.2)
