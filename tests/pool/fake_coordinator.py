"""A fake coordinator for a pool: it accepts the join, requests ledgers and records reports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.cluster_link.stream import SequenceNumbers, add_link_service
from baton.network.cluster_certificates import coordinator_server_credentials
from baton.pb import cluster_pb2 as pb
from baton.pb.common_pb2 import Ledger
from tests.pool.harness import CLUSTER_TOKEN

TIMEOUT_SECONDS = 60.0  # seconds


class FakePoolCoordinator:
    def __init__(self) -> None:
        self.joins: list[pb.Join] = []
        self.stats = pb.NodeStats()
        self.block_hashes: set[int] = set()  # in the pool's index, by its cache events
        self.disk_ledger = Ledger()  # of a pool's disk, as it came with the last ledger
        self.is_joined = False
        self.has_left = False
        self.address = ""
        self._ledgers: asyncio.Queue[Ledger] = asyncio.Queue()
        self._sequence_numbers = SequenceNumbers()
        self._context: Any = None
        self._writing = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(cls, token: str = CLUSTER_TOKEN) -> AsyncIterator["FakePoolCoordinator"]:
        coordinator, server = cls(), grpc.aio.server()
        add_link_service(server, coordinator._serve)
        credentials = coordinator_server_credentials(token, lambda: None)
        coordinator.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        await server.start()
        try:
            yield coordinator
        finally:
            await server.stop(None)

    async def query_ledger(self) -> Ledger:
        """Return the pool's present ledger, which must balance."""
        await self._send(ledger_query=pb.LedgerQuery(query=1))
        async with asyncio.timeout(TIMEOUT_SECONDS):
            found = await self._ledgers.get()
        counted = (
            found.free
            + found.cached
            + found.reserved
            + found.writing
            + found.in_use
            + found.quarantined
        )
        assert counted == found.total, found
        return found

    async def wait_for_ledger(self, **counts: int) -> Ledger:
        """Wait for a ledger with these counts, and no other blocks in use, writing or
        quarantined."""
        expected = {"in_use": 0, "writing": 0, "quarantined": 0} | counts
        loop = asyncio.get_running_loop()
        patience = loop.time() + TIMEOUT_SECONDS
        while True:
            found = await self.query_ledger()
            if all(getattr(found, state) == count for state, count in expected.items()):
                return found
            assert loop.time() < patience, f"not {expected} but {found}"
            await asyncio.sleep(0.02)

    async def arm_failpoints(self, spec: str) -> None:
        """Arm failpoints, and return when they are armed."""
        await self._send(arm=pb.Arm(spec=spec))
        await self.query_ledger()

    async def _serve(self, _: object, context: Any) -> None:
        join = (await context.read()).join
        self._context, self._sequence_numbers = context, SequenceNumbers()
        incarnation = f"{len(self.joins) + 1:016x}"
        await self._send(
            welcome=pb.Welcome(incarnation=incarnation, heartbeat_seconds=0.1, silence_seconds=60.0)
        )
        self.joins.append(join)
        self.is_joined = True
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                self._on_message(message)
        finally:
            self.is_joined = self.is_joined and self._context is not context

    def _on_message(self, message: pb.NodeMessage) -> None:
        match message.WhichOneof("message"):
            case "heartbeat":
                self.stats = message.heartbeat.stats
            case "ledger":
                self.disk_ledger = message.ledger.disk
                self._ledgers.put_nowait(message.ledger.ledger)
            case "cache_snapshot":
                self.block_hashes = set(message.cache_snapshot.names)
            case "cache_events":
                self.block_hashes |= set(message.cache_events.inserted)
                self.block_hashes -= set(message.cache_events.evicted)
            case "leaving":
                self.has_left = True

    async def _send(self, **message: Any) -> None:
        said = pb.CoordinatorMessage(**message)
        async with self._writing:
            self._sequence_numbers.number_message(said)
            await self._context.write(said)
