"""A small paced cluster with recording clients, and means to catch a request in a given state."""

import asyncio
import inspect
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from baton.pb.common_pb2 import Ledger
from tests.history import (
    ClientApi,
    ClientCall,
    Closed,
    History,
    Operation,
)
from tests.history_checks import find_violations
from tests.ledger_checks import find_held_blocks, find_unbalanced_ledgers
from tests.paced_reference import paced_reference_logprobs, paced_reference_tokens
from tests.proxied_cluster import ProxiedCluster
from tests.recording_clients import RecordingClients

TIMEOUT_SECONDS = 40.0  # seconds that a client allows an operation
PATIENCE_SECONDS = 60.0  # seconds after which a wait fails
_POLL_SECONDS = 0.02


class ObservedCluster:
    """One prefill and two decode nodes, all on one host, unless `build` gets other settings."""

    def __init__(self, cluster: ProxiedCluster, clients: RecordingClients) -> None:
        self.cluster = cluster
        self.clients = clients
        self.was_coordinator_killed = False
        self._checked = 0
        self._open: list[PendingCall] = []

    @classmethod
    @asynccontextmanager
    async def build(cls, folder: Path, **settings: Any) -> AsyncIterator[Self]:
        shape = {"prefill": 1, "decode": 2, "layers_per_message": 1} | settings
        async with ProxiedCluster(folder, **shape) as cluster:
            async with RecordingClients(
                cluster.endpoints.http, cluster.endpoints.grpc, History()
            ) as clients:
                yield cls(cluster, clients)

    # requests

    def start_call(self, call: ClientCall) -> "PendingCall":
        operation = self.clients.history.begin_operation(call, time.monotonic())
        asked = PendingCall(operation, asyncio.create_task(self.clients.run_operation(operation)))
        self._open.append(asked)
        return asked

    async def complete_call(self, call: ClientCall) -> tuple[int, ...]:
        """Return the tokens of a call that must succeed; `find_violations` checks them with all
        others."""
        operation = await self.start_call(call).wait_end()
        assert operation.end == Closed(is_orderly=True), (
            f"{operation} ended in {operation.events[-1]}"
        )
        return operation.tokens

    # waiting

    async def wait_until(self, what: str, condition: Callable[[], Any]) -> None:
        """Poll until `condition`, which may return an awaitable, is true."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await _await_value(condition()):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"not so after {PATIENCE_SECONDS:g} s: {what}") from None

    async def wait_until_or_end(
        self, asked: "PendingCall", what: str, condition: Callable[[], Any]
    ) -> bool:
        """Return whether the condition became true before the call ended, or right after."""
        came = False

        async def either() -> bool:
            nonlocal came
            over = asked.task.done()
            came = bool(await _await_value(condition()))
            return came or over

        await self.wait_until(what, either)
        return came

    async def arm_failpoints(self, process: str, spec: str) -> "FailpointTrap":
        """Arm failpoints on the processes whose name begins with `process`."""
        trap = FailpointTrap(self, process, spec.rpartition(";")[2].partition("=")[0])
        await self.cluster.arm_failpoints(process, spec)
        return trap

    def count_failpoint_hits(self, process: str, point: str) -> int:
        """Return how often a failpoint has acted on those processes, according to their logs."""
        acted = re.compile(rf'"point": "{re.escape(point)}".*"event": "failpoint triggered"')
        logs = [
            self.cluster.logs.log_path(name)
            for name in self.cluster.node_names
            if name.startswith(process)
        ]
        return sum(len(acted.findall(path.read_text(errors="replace"))) for path in logs)

    async def wait_placed(self, requests: int = 1) -> None:
        async def placed() -> bool:
            return bool((await self.cluster.get_status()).running >= requests)

        await self.wait_until(f"{requests} requests placed", placed)

    async def wait_admitted(self, requests: int) -> None:
        """Wait until so many requests are placed or queued."""

        async def held() -> bool:
            status = await self.cluster.get_status()
            return bool(status.running + status.queued >= requests)

        await self.wait_until(f"{requests} requests admitted", held)

    async def wait_queued(self, requests: int = 1) -> None:
        async def queued() -> bool:
            return bool((await self.cluster.get_status()).queued >= requests)

        await self.wait_until(f"{requests} requests queued", queued)

    async def wait_blocks(self, *states: str, node: str = "decode") -> Ledger:
        """Wait for, and return, a ledger of such a node with blocks in one of these states."""
        found: list[Ledger] = []

        async def there() -> bool:
            ledgers: Iterable[Ledger] = (await self.cluster.get_ledgers()).ledgers
            found[:] = [
                one
                for one in ledgers
                if one.node.startswith(node) and any(getattr(one, state) for state in states)
            ]
            return bool(found)

        await self.wait_until(f"blocks {' or '.join(states)} on {node}", there)
        return found[0]

    async def wait_tokens(self, asked: "PendingCall", tokens: int = 1) -> None:
        """Wait until the call's client has so many tokens, or the call has ended."""
        await self.wait_until(
            f"{tokens} tokens", lambda: len(asked.operation.tokens) >= tokens or asked.task.done()
        )

    # the end

    async def recover_and_check(self, *, quiet_within: float = PATIENCE_SECONDS) -> None:
        """Remove all faults, then check all calls, a probe call, and that no block is held."""
        cluster = self.cluster
        for proxy in cluster.proxies.values():
            await proxy.heal()
        cluster.start_missing()
        await cluster.disarm_failpoints()
        for asked in self._open:
            await asked.wait_end()
        self._open.clear()
        await self.complete_call(PROBE_CALL)
        await self.wait_blocks_released(quiet_within)
        assert self.find_violations() == []

    async def wait_idle(self) -> None:
        """Wait until no request is queued or running and no block is held."""

        async def idle() -> bool:
            status = await self.cluster.get_status()
            return not status.queued and not status.running

        await self.wait_until("no request queued or running", idle)
        await self.wait_blocks_released()

    async def get_joined_nodes(self) -> set[str]:
        """Names of the nodes that have joined; none while the coordinator is down."""
        try:
            return {node.name for node in (await self.cluster.get_status()).nodes}
        except grpc.RpcError:
            return set()

    async def read_counter(self, name: str) -> float:
        """A counter of the coordinator, summed over all labels."""
        counters = (await self.cluster.get_status()).counters
        return sum(value for key, value in counters.items() if key.partition("{")[0] == name)

    async def wait_blocks_released(self, within: float = PATIENCE_SECONDS) -> None:
        """Wait until every ledger balances and holds only cached blocks."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while True:
            answer = await self.cluster.get_ledgers()
            wrong = [
                *find_unbalanced_ledgers(answer.ledgers),
                *find_held_blocks(answer.ledgers),
                *answer.silent,
            ]
            if not wrong:
                return
            assert loop.time() < deadline, wrong
            await asyncio.sleep(_POLL_SECONDS)

    def exclude_operations(self, operations: Iterable[Operation]) -> None:
        """Exclude operations that were meant to fail from `find_violations`."""
        for operation in operations:
            self.clients.history.operations.remove(operation)

    def find_violations(self) -> list[str]:
        """Violations of the operations since the last call."""
        operations = self.clients.history.operations
        fresh, self._checked = operations[self._checked :], len(operations)
        cut, self.was_coordinator_killed = self.was_coordinator_killed, False
        return find_violations(
            fresh, paced_reference_tokens, scorer=paced_reference_logprobs, cut_excused=cut
        )


class FailpointTrap:
    """Armed failpoints; the last of them is the one that is waited for."""

    def __init__(self, observed: ObservedCluster, process: str, point: str) -> None:
        self._observed = observed
        self._process = process
        self._point = point
        self._hits = observed.count_failpoint_hits(process, point)

    async def wait_hit(self) -> None:
        """Wait until the last failpoint has acted."""
        await self._observed.wait_until(f"{self._point} hit", self.has_hit)

    def has_hit(self) -> bool:
        return self._observed.count_failpoint_hits(self._process, self._point) > self._hits


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that has started, and the task that runs it."""

    operation: Operation
    task: asyncio.Task[Operation]

    async def wait_end(self) -> Operation:
        await asyncio.wait({self.task})
        return self.task.result()

    async def cancel_call(self) -> None:
        """Cancel the call as a client that disconnects, and wait until that is done."""
        self.task.cancel()
        await asyncio.wait({self.task})


def make_call(
    door: ClientApi,
    length: int,
    max_tokens: int,
    *,
    salt: int = 0,
    timeout: float = TIMEOUT_SECONDS,
) -> ClientCall:
    """A call with a different prompt for every (length, salt)."""
    rng = random.Random(f"{length} {salt}")
    return ClientCall(
        door, tuple(rng.randrange(1, 32000) for _ in range(length)), max_tokens, timeout
    )


PROBE_CALL = make_call(ClientApi.GRPC_ONCE, 40, 3)


async def _await_value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
