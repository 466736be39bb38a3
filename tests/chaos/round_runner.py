"""Runs rounds on one cluster, and says what was wrong with each."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import grpc

from baton.cli.supervisor.child_specs import COORDINATOR
from baton.pb.cluster_pb2 import ExplainRequest, ExplainResponse
from tests.chaos.rounds import ChaosLoad, ChaosRound
from tests.grpc_calls import call_cluster_service
from tests.history import (
    ClientApi,
    ClientCall,
    Closed,
    Failed,
    History,
    Operation,
    RequestIdentity,
    Tokens,
)
from tests.history_checks import find_mixed_models, find_violations
from tests.ledger_checks import find_held_blocks, find_unbalanced_ledgers
from tests.proxied_cluster import ProxiedCluster
from tests.recording_clients import RecordingClients

_POLL_SECONDS = 0.2  # seconds between looks at the ledgers while a load runs
_PROBE_TIMEOUT_SECONDS = 40.0  # seconds: it must succeed, however busy the machine
_RETRY_SECONDS = 0.05  # seconds that a client waits before it asks again
_RECOVERY_TIMEOUT_SECONDS = 60.0  # seconds from the end of a fault to full service
_IDLE_TIMEOUT_SECONDS = 60.0  # seconds from the end of a load until nothing is held


class RoundRunner:
    """Runs rounds on one cluster, which must not be used again after a round with violations."""

    def __init__(self, cluster: ProxiedCluster, load: ChaosLoad) -> None:
        self.cluster = cluster
        self._load_plan = load
        self._probe = ClientCall(
            ClientApi.GRPC_STREAM, load.draw_prompt(random.Random(0)), 5, _PROBE_TIMEOUT_SECONDS
        )
        self.outcomes: Counter[str] = Counter()

    async def run_round(self, one: ChaosRound) -> list[str]:
        """Run a round and return all violations; see tests/history_checks.py."""
        cluster = self.cluster
        before = cluster.get_pids()
        history = History()
        async with (
            RecordingClients(cluster.endpoints.http, cluster.endpoints.grpc, history) as clients,
            self._watch_ledgers() as seen,
        ):
            over = asyncio.Event()
            load = asyncio.create_task(self._run_load(clients, one, over))
            await self._wait_tokens(clients, one.strike_after_tokens)
            for fault in one.faults:
                await fault.inject(cluster)
            await asyncio.sleep(one.duration_seconds)  # how long it lasts is part of the fault
            for fault in reversed(one.faults):
                await fault.remove(cluster)
            cluster.start_missing()
            over.set()
            await load
            wrong = self._find_violations(history, one) + await self._find_mixed_models(
                history, one
            )
            wrong += await self._check_recovery(clients, one)
            wrong += [f"I5: {line}" for line in self._unexpected_exits(before, one)]
        self.outcomes += history.count_outcomes()
        return [*wrong, *seen]

    async def _run_load(
        self, clients: RecordingClients, one: ChaosRound, over: asyncio.Event
    ) -> None:
        """Send one call after the other from each client, until the fault is over and as many
        more have been made."""
        calls = self._load_plan.generate_calls(one.seed)

        async def client() -> None:
            while not over.is_set():
                operation = await clients.run_call(next(calls))
                if isinstance(operation.end, Failed):
                    await asyncio.sleep(_RETRY_SECONDS)
            await clients.run_call(next(calls))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._load_plan.client_count):
                group.create_task(client())

    async def _wait_tokens(self, clients: RecordingClients, tokens: int) -> None:
        """Wait until the clients have that many tokens."""
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

    def _find_violations(self, history: History, one: ChaosRound) -> list[str]:
        return find_violations(
            history.operations,
            self._load_plan.reference,
            scorer=self._load_plan.scorer,
            cut_excused=COORDINATOR in one.killed_processes,
            stop_excused=COORDINATOR in one.victims,
        )

    async def _find_mixed_models(self, history: History, one: ChaosRound) -> list[str]:
        """Check I7 also for APIs that do not report the model: the coordinator knows it, unless
        it was restarted since."""
        told, wrong, excused = list[RequestIdentity](), list[str](), COORDINATOR in one.victims
        for operation in history.operations:
            if operation.identity is not None and not operation.identity.model_digests:
                try:
                    told.append(await self._explain_identity(operation.identity.request_id))
                except grpc.RpcError as error:
                    if operation.finished is not None and not excused:
                        wrong.append(f"{operation}: I7: cannot be explained: {error}")
        answers = [*(operation.identity for operation in history.operations), *told]
        if (
            not excused
            and history.count_outcomes()["finished"]
            and not any(answer and answer.model_digests for answer in answers)
        ):
            wrong.append("I7: no operation of the round names a model")
        return [*wrong, *find_mixed_models(answers)]

    async def _explain_identity(self, request: str) -> RequestIdentity:
        asked = ExplainRequest(request_id=request)
        answer: ExplainResponse = await call_cluster_service(
            self.cluster.grpc_address, "Explain", asked
        )
        models = dict.fromkeys(
            model for one in (answer, *answer.others) for model in one.timeline.models
        )
        return RequestIdentity(request, tuple(models))

    def _unexpected_exits(self, before: dict[str, int], one: ChaosRound) -> list[str]:
        now = self.cluster.get_pids()
        spared = before.keys() - one.victims
        return [f"{name} has ended" for name in sorted(spared) if now.get(name) != before[name]]

    async def _check_recovery(self, clients: RecordingClients, one: ChaosRound) -> list[str]:
        """I6, then I1 without traffic. Failpoints of the fault may act until they are disarmed."""
        try:
            await self.cluster.wait_all_joined(_RECOVERY_TIMEOUT_SECONDS, one.victims)
            await self.cluster.disarm_failpoints(one.victims)
        except TimeoutError:
            return [
                f"I6: not recovered {_RECOVERY_TIMEOUT_SECONDS:g} s after the fault: "
                f"{await self._describe_state()}"
            ]
        probes = [await clients.run_call(self._probe) for _ in range(len(self.cluster.node_names))]
        bad = [str(probe.events[-1][1]) for probe in probes if probe.end != Closed(is_orderly=True)]
        wrong = [f"I6: a probe of the healed cluster ended in {end}" for end in bad]
        wrong += find_violations(probes, self._load_plan.reference)
        return wrong + await self._find_held_blocks()

    async def _find_held_blocks(self) -> list[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _IDLE_TIMEOUT_SECONDS
        while True:
            answer = await self.cluster.get_ledgers()
            wrong = [*find_unbalanced_ledgers(answer.ledgers), *find_held_blocks(answer.ledgers)]
            wrong += [f"I1: {node} does not say what it holds" for node in answer.silent]
            if not wrong or loop.time() > deadline:
                return wrong
            await asyncio.sleep(_POLL_SECONDS)

    @contextlib.asynccontextmanager
    async def _watch_ledgers(self) -> AsyncIterator[list[str]]:
        """Poll the ledgers while the block runs; the list collects unbalanced ones."""
        seen: list[str] = []
        watching = asyncio.create_task(self._poll_ledgers(seen))
        try:
            yield seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _poll_ledgers(self, seen: list[str]) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError):  # the coordinator may be the victim
                seen += find_unbalanced_ledgers((await self.cluster.get_ledgers()).ledgers)
            await asyncio.sleep(_POLL_SECONDS)

    async def _describe_state(self) -> str:
        try:
            status = await self.cluster.get_status()
        except grpc.RpcError as error:
            return f"{sorted(self.cluster.get_pids())} run, and the coordinator says {error}"
        joined = [node.name for node in status.nodes]
        return f"{sorted(self.cluster.get_pids())} run, {joined} have joined; {status.reason}"
