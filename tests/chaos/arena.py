"""Runs rounds on one cluster, and says what was wrong with each."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import grpc

from baton.cli.plan import COORDINATOR
from baton.pb.cluster_pb2 import ExplainRequest, ExplainResponse
from tests.answers import cluster_call
from tests.chaos.rounds import Load, Round
from tests.clients import Clients
from tests.history import (
    Call,
    Closed,
    Door,
    Failed,
    History,
    Operation,
    Served,
    Tokens,
    complaints,
    held,
    mixed_models,
    unbalanced,
)
from tests.linked_cluster import LinkedCluster

_LOOK_EVERY = 0.2  # seconds between looks at the ledgers while a load runs
_PROBE_TIMEOUT = 40.0  # seconds: it must succeed, however busy the machine
_AFTER_FAILURE = 0.05  # seconds that a client waits before it asks again
_RECOVERY = 60.0  # seconds from the end of a fault to full service
_QUIET = 60.0  # seconds from the end of a load until nothing is held


class Arena:
    """One cluster, used for many rounds. After a round with complaints it is not to be used again."""

    def __init__(self, cluster: LinkedCluster, load: Load) -> None:
        self.cluster = cluster
        self._asks = load
        self._probe = Call(Door.GRPC_STREAM, load.prompt(random.Random(0)), 5, _PROBE_TIMEOUT)
        self.outcomes: Counter[str] = Counter()

    async def play(self, one: Round) -> list[str]:
        """Everything that was wrong, by invariant; see tests/history.py."""
        cluster = self.cluster
        before = cluster.pids()
        history = History()
        async with Clients(cluster.where.http, cluster.where.grpc, history) as clients, self._watched() as seen:
            over = asyncio.Event()
            load = asyncio.create_task(self._load(clients, one, over))
            await self._received(clients, one.moment)
            for fault in one.faults:
                await fault.strike(cluster)
            await asyncio.sleep(one.lasts)  # how long it lasts is part of the fault
            for fault in reversed(one.faults):
                await fault.relent(cluster)
            cluster.revive()
            over.set()
            await load
            wrong = self._judged(history, one) + await self._mixed_models(history, one)
            wrong += await self._recovered(clients, one)
            wrong += [f"I5: {line}" for line in self._ended(before, one)]
        self.outcomes += history.outcomes()
        return [*wrong, *seen]

    async def _load(self, clients: Clients, one: Round, over: asyncio.Event) -> None:
        """One call after the other at each client, until the fault is over and as many more have been made."""
        calls = self._asks.calls(one.seed)

        async def client() -> None:
            while not over.is_set():
                operation = await clients.perform(next(calls))
                if isinstance(operation.end, Failed):
                    await asyncio.sleep(_AFTER_FAILURE)
            await clients.perform(next(calls))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._asks.clients):
                group.create_task(client())

    async def _received(self, clients: Clients, tokens: int) -> None:
        """Until the clients have that many tokens."""
        received = 0
        reached = asyncio.Event()

        def count(operation: Operation) -> None:
            nonlocal received
            event = operation.events[-1][1]
            received += len(event.tokens) if isinstance(event, Tokens) else 0
            if received >= tokens:
                reached.set()

        clients.on_event = count
        await reached.wait()

    def _judged(self, history: History, one: Round) -> list[str]:
        return complaints(
            history.operations,
            self._asks.outputs,
            scorer=self._asks.scorer,
            cut_excused=COORDINATOR in one.killed,
            stop_excused=COORDINATOR in one.victims,
        )

    async def _mixed_models(self, history: History, one: Round) -> list[str]:
        """I7, also for the doors that do not tell: the coordinator does, unless it has been started again since."""
        told, wrong, excused = list[Served](), list[str](), COORDINATOR in one.victims
        for operation in history.operations:
            if operation.served is not None and not operation.served.models:
                try:
                    told.append(await self._explained(operation.served.request))
                except grpc.RpcError as error:
                    if operation.finished is not None and not excused:
                        wrong.append(f"{operation}: I7: cannot be explained: {error}")
        answers = [*(operation.served for operation in history.operations), *told]
        if not excused and history.outcomes()["finished"] and not any(answer and answer.models for answer in answers):
            wrong.append("I7: no operation of the round names a model")
        return [*wrong, *mixed_models(answers)]

    async def _explained(self, request: str) -> Served:
        asked = ExplainRequest(request_id=request)
        answer: ExplainResponse = await cluster_call(self.cluster.grpc, "Explain", asked)
        models = dict.fromkeys(model for one in (answer, *answer.others) for model in one.timeline.models)
        return Served(request, tuple(models))

    def _ended(self, before: dict[str, int], one: Round) -> list[str]:
        now = self.cluster.pids()
        spared = before.keys() - one.victims
        return [f"{name} has ended" for name in sorted(spared) if now.get(name) != before[name]]

    async def _recovered(self, clients: Clients, one: Round) -> list[str]:
        """I6, then I1 at rest. The fault is over, but what it has armed may strike until it is disarmed."""
        try:
            await self.cluster.whole(_RECOVERY, one.victims)
            await self.cluster.disarm(one.victims)
        except TimeoutError:
            return [f"I6: not whole again {_RECOVERY:g} s after the fault: {await self._state()}"]
        probes = [await clients.perform(self._probe) for _ in range(len(self.cluster.nodes))]
        bad = [str(probe.events[-1][1]) for probe in probes if probe.end != Closed(in_order=True)]
        wrong = [f"I6: a probe of the healed cluster ended in {end}" for end in bad]
        wrong += complaints(probes, self._asks.outputs)
        return wrong + await self._still_held()

    async def _still_held(self) -> list[str]:
        loop = asyncio.get_running_loop()
        patience = loop.time() + _QUIET
        while True:
            answer = await self.cluster.ledgers()
            wrong = [*unbalanced(answer.ledgers), *held(answer.ledgers)]
            wrong += [f"I1: {node} does not say what it holds" for node in answer.silent]
            if not wrong or loop.time() > patience:
                return wrong
            await asyncio.sleep(_LOOK_EVERY)

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[list[str]]:
        """The ledgers, while the block runs: a list that collects what is out of balance at any look."""
        seen: list[str] = []
        watching = asyncio.create_task(self._watch(seen))
        try:
            yield seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, seen: list[str]) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError):  # the coordinator may be the victim
                seen += unbalanced((await self.cluster.ledgers()).ledgers)
            await asyncio.sleep(_LOOK_EVERY)

    async def _state(self) -> str:
        try:
            status = await self.cluster.status()
        except grpc.RpcError as error:
            return f"{sorted(self.cluster.pids())} run, and the coordinator says {error}"
        return f"{sorted(self.cluster.pids())} run, {[node.name for node in status.nodes]} have joined; {status.reason}"
