"""A small paced cluster whose clients write down what they see, and the means to catch a request in a state."""

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
from node_engine.paced import paced_reference, paced_scores
from tests.clients import Clients
from tests.history import Call, Closed, Door, History, Operation, complaints, held, unbalanced
from tests.linked_cluster import LinkedCluster

TIMEOUT = 40.0  # seconds that a client allows an operation
PATIENCE = 60.0  # seconds until a scenario is stuck
_LOOK_EVERY = 0.02


class Scene:
    """One prefill and two decode nodes, all on one host, unless told otherwise."""

    def __init__(self, cluster: LinkedCluster, clients: Clients) -> None:
        self.cluster = cluster
        self.clients = clients
        self.coordinator_died = False
        self._judged = 0
        self._open: list[Asked] = []

    @classmethod
    @asynccontextmanager
    async def build(cls, folder: Path, **settings: Any) -> AsyncIterator[Self]:
        shape = {"prefill": 1, "decode": 2, "layers_per_message": 1} | settings
        async with LinkedCluster(folder, **shape) as cluster:
            async with Clients(cluster.where.http, cluster.where.grpc, History()) as clients:
                yield cls(cluster, clients)

    # asking

    def ask(self, call: Call) -> "Asked":
        operation = self.clients.history.begin(call, time.monotonic())
        asked = Asked(operation, asyncio.create_task(self.clients.carry_out(operation)))
        self._open.append(asked)
        return asked

    async def answer(self, call: Call) -> tuple[int, ...]:
        """Of a call that must succeed. Whether it is right is looked at in the end, as of all."""
        operation = await self.ask(call).over()
        assert operation.end == Closed(in_order=True), f"{operation} ended in {operation.events[-1]}"
        return operation.tokens

    # waiting

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """`condition` may return an awaitable."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not await _value(condition()):
                    await asyncio.sleep(_LOOK_EVERY)
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE:g} s in vain: {what}") from None

    async def before_its_end(self, asked: "Asked", what: str, condition: Callable[[], Any]) -> bool:
        """Whether the condition came to hold while the call was under way, or right after."""
        came = False

        async def either() -> bool:
            nonlocal came
            over = asked.task.done()
            came = bool(await _value(condition()))
            return came or over

        await self.until(what, either)
        return came

    async def arm(self, process: str, spec: str) -> "Trap":
        """Failpoints on the processes whose name begins with `process`."""
        trap = Trap(self, process, spec.rpartition(";")[2].partition("=")[0])
        await self.cluster.arm(process, spec)
        return trap

    def hits(self, process: str, point: str) -> int:
        """How often a failpoint has acted on those processes, by their logs."""
        acted = re.compile(rf'"point": "{re.escape(point)}".*"event": "failpoint"')
        logs = [self.cluster.logs.path(name) for name in self.cluster.nodes if name.startswith(process)]
        return sum(len(acted.findall(path.read_text(errors="replace"))) for path in logs)

    async def until_placed(self, requests: int = 1) -> None:
        async def placed() -> bool:
            return bool((await self.cluster.status()).running >= requests)

        await self.until(f"{requests} requests placed", placed)

    async def until_taken_in(self, requests: int) -> None:
        """Placed or queued."""

        async def held() -> bool:
            status = await self.cluster.status()
            return bool(status.running + status.queued >= requests)

        await self.until(f"{requests} requests taken in", held)

    async def until_queued(self, requests: int = 1) -> None:
        async def queued() -> bool:
            return bool((await self.cluster.status()).queued >= requests)

        await self.until(f"{requests} requests queued", queued)

    async def until_blocks(self, *states: str, node: str = "decode") -> Ledger:
        """A ledger of a node of that name that has blocks in one of these states."""
        found: list[Ledger] = []

        async def there() -> bool:
            ledgers: Iterable[Ledger] = (await self.cluster.ledgers()).ledgers
            found[:] = [
                one for one in ledgers if one.node.startswith(node) and any(getattr(one, state) for state in states)
            ]
            return bool(found)

        await self.until(f"blocks {' or '.join(states)} on {node}", there)
        return found[0]

    async def until_tokens(self, asked: "Asked", tokens: int = 1) -> None:
        """Until its client has so many tokens, or it has ended."""
        await self.until(f"{tokens} tokens", lambda: len(asked.operation.tokens) >= tokens or asked.task.done())

    # the end

    async def settle(self, *, quiet_within: float = PATIENCE) -> None:
        """Faults are over: everybody is back, every operation has ended and ended well, a probe succeeds, and no block
        is held anywhere."""
        cluster = self.cluster
        for link in cluster.links.values():
            await link.heal()
        cluster.revive()
        await cluster.disarm()
        for asked in self._open:
            await asked.over()
        self._open.clear()
        await self.answer(PROBE)
        await self.quiet(quiet_within)
        assert self.judge() == []

    async def at_rest(self) -> None:
        """Nothing waits, nothing runs, nothing is held."""

        async def idle() -> bool:
            status = await self.cluster.status()
            return not status.queued and not status.running

        await self.until("no request queued or running", idle)
        await self.quiet()

    async def joined(self) -> set[str]:
        """Names of the nodes that the coordinator, if there is one, knows."""
        try:
            return {node.name for node in (await self.cluster.status()).nodes}
        except grpc.RpcError:
            return set()

    async def counter(self, name: str) -> float:
        """One of the coordinator's own, over all labels."""
        counters = (await self.cluster.status()).counters
        return sum(value for key, value in counters.items() if key.partition("{")[0] == name)

    async def quiet(self, within: float = PATIENCE) -> None:
        """Every ledger balances and holds nothing but cache."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + within
        while True:
            answer = await self.cluster.ledgers()
            wrong = [*unbalanced(answer.ledgers), *held(answer.ledgers), *answer.silent]
            if not wrong:
                return
            assert loop.time() < patience, wrong
            await asyncio.sleep(_LOOK_EVERY)

    def forget(self, operations: Iterable[Operation]) -> None:
        """Those that were meant to fail are not judged with the others."""
        for operation in operations:
            self.clients.history.operations.remove(operation)

    def judge(self) -> list[str]:
        """What is wrong with the operations since the last time."""
        operations = self.clients.history.operations
        fresh, self._judged = operations[self._judged :], len(operations)
        cut, self.coordinator_died = self.coordinator_died, False
        return complaints(fresh, paced_reference, scorer=paced_scores, cut_excused=cut)


class Trap:
    """Armed failpoints, the last of which is to catch somebody."""

    def __init__(self, scene: Scene, process: str, point: str) -> None:
        self._scene = scene
        self._process = process
        self._point = point
        self._hits = scene.hits(process, point)

    async def sprung(self) -> None:
        """Until somebody has come to the last point."""
        await self._scene.until(f"{self._point} hit", self.has_sprung)

    def has_sprung(self) -> bool:
        return self._scene.hits(self._process, self._point) > self._hits


@dataclass(frozen=True, slots=True)
class Asked:
    """A call under way."""

    operation: Operation
    task: asyncio.Task[Operation]

    async def over(self) -> Operation:
        await asyncio.wait({self.task})
        return self.task.result()

    async def leave(self) -> None:
        """The client goes away; returns when it is gone."""
        self.task.cancel()
        await asyncio.wait({self.task})


def call(door: Door, length: int, max_tokens: int, *, salt: int = 0, timeout: float = TIMEOUT) -> Call:
    """A call with a prompt of its own for every (length, salt)."""
    rng = random.Random(f"{length} {salt}")
    return Call(door, tuple(rng.randrange(1, 32000) for _ in range(length)), max_tokens, timeout)


PROBE = call(Door.GRPC_ONCE, 40, 3)


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
