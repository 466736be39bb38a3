"""A load on a cluster of paced nodes whose processes are killed, and the times of recovery.

A node comes back under its name and address, or under others, as a container that took its place
would; nobody tells the rest of the cluster. What recovery means is what a client sees: the first
new request after the kill that is answered whole.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from baton.cli.supervisor import ports
from baton.cli.supervisor.child_specs import COORDINATOR
from baton.pb.cluster_pb2 import StatusResponse
from tests.cluster import Cluster
from tests.history import (
    ClientApi,
    ClientCall,
    Closed,
    Failed,
    History,
    Hung,
    Operation,
    Tokens,
)
from tests.history_checks import find_violations
from tests.paced_reference import paced_reference_tokens
from tests.recording_clients import RecordingClients

CLIENTS = 8
DEADLINE_SECONDS = 60.0  # seconds that clients of the load allow
TOKENS_BETWEEN_KILLS = 40  # tokens that reach the clients between two kills
TIMEOUT_SECONDS = 100.0  # seconds until the run is given up
_PROBE_DEADLINE = 30.0
_RETRY_SECONDS = 0.05  # seconds before a client asks again
_VOCAB_SIZE = 32000


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """How long recovery took after one kill, in seconds from the start of the new process."""

    victim: str
    address: str
    listening_seconds: float  # the HTTP port accepts connections; it never stops if a node died
    answered_seconds: float  # the first new request has its complete answer
    rejoined_seconds: float  # all processes have joined and the cluster is ready

    def __str__(self) -> str:
        where = f"{self.victim} at {self.address} address"
        return (
            f"{where}: listens after {self.listening_seconds:.2f} s, "
            f"answered {self.answered_seconds:.2f} s, rejoined {self.rejoined_seconds:.2f} s"
        )


class KillRunner:
    """Kills processes of a cluster under load; `seed` determines the requests."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.history = History()
        self._seed = seed
        self._clients = RecordingClients(
            cluster.endpoints.http, cluster.endpoints.grpc, self.history
        )
        self._kill_times: list[float] = []
        self._received = 0
        self._reached = asyncio.Event()

    @asynccontextmanager
    async def running_load(self) -> AsyncIterator[None]:
        """Each client asks again when it has been answered. Afterwards every request has ended."""
        over = asyncio.Event()
        self._clients.on_event = self._count_tokens
        async with self._clients, asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._run_client(self._generate_calls(number), over))
            yield
            over.set()

    async def kill_process(
        self, victim: str, *, elsewhere: bool = False, down: float = 0.0
    ) -> RecoveryTimes:
        """Kill it under load and start it again after `down` seconds, `elsewhere`: under another
        name and address. Returns when the cluster is whole; the times are from the moment of the
        new start."""
        await self._wait_traffic()
        self._kill_times.append(time.monotonic())
        self.cluster.kill(victim)
        if elsewhere:
            self._change_address(victim)
        await asyncio.sleep(down)  # how long it is gone is part of the fault
        began = time.monotonic()
        self.cluster.start(victim)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self._wait_listening()
            listens = time.monotonic() - began
            await self._wait_answered()
            answered = time.monotonic() - began
            await self._wait_all_joined()
        address = "another" if elsewhere else "the same"
        return RecoveryTimes(victim, address, listens, answered, time.monotonic() - began)

    def find_violations(self, *, coordinator_died: bool) -> list[str]:
        """What was wrong with any answer. While only nodes die, no request fails."""
        operations = self.history.operations
        found = find_violations(operations, paced_reference_tokens, cut_excused=coordinator_died)
        found += [
            f"{one} hung: {self._describe_time(one.started_at)}"
            for one in operations
            if isinstance(one.events[-1][1], Hung)
        ]
        if coordinator_died:
            return found
        failed = [one for one in operations if one.end != Closed(is_orderly=True)]
        return found + [f"{one} ended in {one.events[-1][1]}" for one in failed]

    # inside

    async def _run_client(self, calls: Iterator[ClientCall], over: asyncio.Event) -> None:
        while not over.is_set():
            operation = await self._clients.run_call(next(calls))
            if isinstance(operation.end, Failed):
                await asyncio.sleep(_RETRY_SECONDS)

    def _generate_calls(self, number: int) -> Iterator[ClientCall]:
        rng = random.Random(f"kills {self._seed} {number}")
        while True:
            door, length = rng.choice(list(ClientApi)), rng.choice((1, 16, 33, 100, 300))
            prompt = tuple(rng.randrange(1, _VOCAB_SIZE) for _ in range(length))
            yield ClientCall(door, prompt, rng.choice((1, 2, 17, 60)), DEADLINE_SECONDS)

    def _count_tokens(self, operation: Operation) -> None:
        event = operation.events[-1][1]
        self._received += len(event.tokens) if isinstance(event, Tokens) else 0
        if self._received >= TOKENS_BETWEEN_KILLS:
            self._reached.set()

    async def _wait_traffic(self) -> None:
        self._received = 0
        self._reached.clear()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await self._reached.wait()

    def _describe_time(self, moment: float) -> str:
        before = [at for at in self._kill_times if at <= moment]
        after = (
            f"{moment - before[-1]:.3f} s after kill {len(before)}"
            if before
            else "before the first kill"
        )
        return f"it began {after} of {len(self._kill_times)}"

    async def _wait_listening(self) -> None:
        host, _, port = self.cluster.endpoints.http.rpartition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                writer.close()
                return

    async def _wait_answered(self) -> None:
        rng = random.Random(f"probe {self._seed} {len(self._kill_times)}")
        prompt = tuple(rng.randrange(1, _VOCAB_SIZE) for _ in range(20))
        while True:
            probe = await self._clients.run_call(
                ClientCall(ClientApi.GRPC_STREAM, prompt, 3, _PROBE_DEADLINE)
            )
            if probe.end == Closed(is_orderly=True):
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _wait_all_joined(self) -> None:
        while not await self._are_all_joined():
            await asyncio.sleep(_RETRY_SECONDS)

    async def _are_all_joined(self) -> bool:
        try:
            status: StatusResponse = await self.cluster.get_status()
        except grpc.RpcError:
            return False
        nodes = {pid for name, pid in self.cluster.get_pids().items() if name != COORDINATOR}
        return status.ready and {node.pid for node in status.nodes} == nodes

    def _change_address(self, victim: str) -> None:
        """Another name, and another port for whoever listens."""
        held = ports.reserve_port("127.0.0.1", 0, "--listen")
        address = f"127.0.0.1:{held.getsockname()[1]}"
        held.close()
        self.cluster.per_node[victim] = {
            "listen": address,
            "name": f"{victim}-{len(self._kill_times)}",
        }
