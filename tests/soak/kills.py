"""A load on a cluster of paced nodes whose processes are killed, and how soon each is made good.

A node comes back under its name and address, or under others, as a container that took its place would; nobody tells
the rest of the cluster. What recovery means is what a client sees: the first new request after the kill that is
answered whole.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from baton.cli import ports
from baton.cli.plan import COORDINATOR
from baton.pb.cluster_pb2 import StatusResponse
from node_engine.paced import paced_reference
from tests.clients import Clients
from tests.cluster import Cluster
from tests.history import Call, Closed, Door, Failed, History, Hung, Operation, Tokens, complaints

CLIENTS = 8
DEADLINE = 60.0  # seconds that clients of the load allow
BEFORE = 40  # tokens that reach the clients between two kills
PATIENCE = 100.0  # seconds until the run is given up
_PROBE_DEADLINE = 30.0
_AFTER_FAILURE = 0.05  # seconds before a client asks again
_VOCABULARY = 32000


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the new start, which follows the kill: `listens`, the front door takes connections (at once unless
    it was the coordinator that died); `answered`, the first new request has its whole answer; `whole`, all processes
    have joined and the cluster is ready."""

    victim: str
    address: str
    listens: float
    answered: float
    whole: float

    def __str__(self) -> str:
        where = f"{self.victim} at {self.address} address"
        times = f"listens after {self.listens:.2f} s, answered {self.answered:.2f} s, whole {self.whole:.2f} s"
        return f"{where}: {times}"


class Range:
    """Where processes are killed. `seed` makes the requests."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.history = History()
        self._seed = seed
        self._clients = Clients(cluster.where.http, cluster.where.grpc, self.history)
        self._killed: list[float] = []
        self._received = 0
        self._reached = asyncio.Event()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Each client asks again when it has been answered. Afterwards every request has ended."""
        over = asyncio.Event()
        self._clients.on_event = self._count
        async with self._clients, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(self._calls(number), over))
            yield
            over.set()

    async def kill(self, victim: str, *, elsewhere: bool = False, down: float = 0.0) -> Recovery:
        """Kill it under load and start it again after `down` seconds, `elsewhere`: under another name and address.
        Returns when the cluster is whole; the times are from the moment of the new start."""
        await self._flowing()
        self._killed.append(time.monotonic())
        self.cluster.kill(victim)
        if elsewhere:
            self._move(victim)
        await asyncio.sleep(down)  # how long it is gone is part of the fault
        began = time.monotonic()
        self.cluster.start(victim)
        async with asyncio.timeout(PATIENCE):
            await self._listens()
            listens = time.monotonic() - began
            await self._answered()
            answered = time.monotonic() - began
            await self._whole()
        address = "another" if elsewhere else "the same"
        return Recovery(victim, address, listens, answered, time.monotonic() - began)

    def complaints(self, *, coordinator_died: bool) -> list[str]:
        """What was wrong with any answer. While only nodes die, no request fails."""
        operations = self.history.operations
        found = complaints(operations, paced_reference, cut_excused=coordinator_died)
        found += [f"{one} hung: {self._when(one.began)}" for one in operations if isinstance(one.events[-1][1], Hung)]
        if coordinator_died:
            return found
        failed = [one for one in operations if one.end != Closed(in_order=True)]
        return found + [f"{one} ended in {one.events[-1][1]}" for one in failed]

    # inside

    async def _client(self, calls: Iterator[Call], over: asyncio.Event) -> None:
        while not over.is_set():
            operation = await self._clients.perform(next(calls))
            if isinstance(operation.end, Failed):
                await asyncio.sleep(_AFTER_FAILURE)

    def _calls(self, number: int) -> Iterator[Call]:
        rng = random.Random(f"kills {self._seed} {number}")
        while True:
            door, length = rng.choice(list(Door)), rng.choice((1, 16, 33, 100, 300))
            prompt = tuple(rng.randrange(1, _VOCABULARY) for _ in range(length))
            yield Call(door, prompt, rng.choice((1, 2, 17, 60)), DEADLINE)

    def _count(self, operation: Operation) -> None:
        event = operation.events[-1][1]
        self._received += len(event.tokens) if isinstance(event, Tokens) else 0
        if self._received >= BEFORE:
            self._reached.set()

    async def _flowing(self) -> None:
        self._received = 0
        self._reached.clear()
        async with asyncio.timeout(PATIENCE):
            await self._reached.wait()

    def _when(self, moment: float) -> str:
        before = [at for at in self._killed if at <= moment]
        after = f"{moment - before[-1]:.3f} s after kill {len(before)}" if before else "before the first kill"
        return f"it began {after} of {len(self._killed)}"

    async def _listens(self) -> None:
        host, _, port = self.cluster.where.http.rpartition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(_AFTER_FAILURE)
            else:
                writer.close()
                return

    async def _answered(self) -> None:
        rng = random.Random(f"probe {self._seed} {len(self._killed)}")
        prompt = tuple(rng.randrange(1, _VOCABULARY) for _ in range(20))
        while True:
            probe = await self._clients.perform(Call(Door.GRPC_STREAM, prompt, 3, _PROBE_DEADLINE))
            if probe.end == Closed(in_order=True):
                return
            await asyncio.sleep(_AFTER_FAILURE)

    async def _whole(self) -> None:
        while not await self._is_whole():
            await asyncio.sleep(_AFTER_FAILURE)

    async def _is_whole(self) -> bool:
        try:
            status: StatusResponse = await self.cluster.status()
        except grpc.RpcError:
            return False
        nodes = {pid for name, pid in self.cluster.pids().items() if name != COORDINATOR}
        return status.ready and {node.pid for node in status.nodes} == nodes

    def _move(self, victim: str) -> None:
        """Another name, and another port for whoever listens."""
        held = ports.hold("127.0.0.1", 0, "--listen")
        address = f"127.0.0.1:{held.getsockname()[1]}"
        held.close()
        self.cluster.per_node[victim] = {"listen": address, "name": f"{victim}-{len(self._killed)}"}
