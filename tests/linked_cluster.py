"""A cluster of real processes in which every link between two of them goes through a fault proxy.

Links are named by who dials and who listens: `prefill-0 -> coordinator`, `decode-1 -> coordinator`, and `prefill ->
decode-1` for all writers of one decode node.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from baton.cli import plan, ports
from baton.pb import cluster_pb2
from baton.types import Role
from tests.cluster import Cluster
from tests.fault_proxy import Address, FaultyLink

_ARMING = 30.0  # seconds
INTRUDER = "intruder"

# Everybody loses patience soon, so that a fault and the recovery from it take seconds.
IMPATIENT: dict[str, Any] = {
    "heartbeat": 0.2,
    "silence": 1.0,
    "stall": 2.0,
    "ticket_ttl": 1.5,
    "progress_timeout": 1.5,
    "request_timeout": 40.0,
    "drain_timeout": 1.0,
    "engine": "paced",
    "paced_prefill_us_per_token": 200.0,
    "paced_step_ms": 4.0,
    "paced_reread": True,
    "max_model_len": 1024,
    "kv_memory": "2MiB",
    "max_num_seqs": 16,
    "max_batched_tokens": 128,
    "log_level": "info",
    "log_format": "json",
}


class LinkedCluster(Cluster):
    """See Cluster. `seed` decides which bits the links corrupt; `other_model` are the settings in which an intruder
    differs. Belongs to the event loop that it was entered on."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: int,
        decode: int,
        seed: int = 0,
        per_node: Mapping[str, Mapping[str, object]] | None = None,
        other_model: Mapping[str, object] | None = None,
        **settings: Any,
    ) -> None:
        self.nodes = tuple(
            f"{role.value}-{index}"
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
            for index in range(count)
        )
        self.processes = (plan.COORDINATOR, *self.nodes)
        self.links: dict[str, FaultyLink] = {}
        self._seed = seed
        self._listen: list[socket.socket] = []
        self._mine: dict[str, dict[str, object]] = {name: dict((per_node or {}).get(name, {})) for name in self.nodes}
        self._other_model = dict(other_model or {"paced_vocab_size": 31999})
        super().__init__(
            folder,
            per_node=self._mine,
            held_back=(*self.processes, INTRUDER),
            also={INTRUDER: "decode-0"},
            wait_ready=False,
            prefill=prefill,
            decode=decode,
            **{**IMPATIENT, **settings},
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            for node in self.nodes:
                await self._link(node)
            for process in self.processes:
                self.start(process)
            await self.ready(self._start_timeout)
            await self.whole()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await super().__aexit__(kind, error, trace)
        for link in self.links.values():
            await link.close()
        for held in self._listen:
            held.close()

    async def _link(self, node: str) -> None:
        host, _, port = self.where.cluster.rpartition(":")
        up = await self._open(f"{node} -> {plan.COORDINATOR}", (host, int(port)))
        self._mine[node]["coordinator"] = _spelled(up.address)
        if node.startswith(Role.DECODE.value):
            held = ports.hold("127.0.0.1", 0, "--listen")
            self._listen.append(held)
            listen: Address = held.getsockname()
            across = await self._open(f"prefill -> {node}", listen)
            self._mine[node] |= {"listen": _spelled(listen), "advertise": _spelled(across.address)}

    async def _open(self, name: str, upstream: Address) -> FaultyLink:
        link = self.links[name] = await FaultyLink.open(name, upstream, seed=self._seed + len(self.links))
        return link

    # what rounds and scenarios ask for

    def own(self, node: str) -> dict[str, object]:
        """The settings that this node alone is started with."""
        return self._mine[node]

    def running(self, name: str) -> bool:
        return name in self.pids()

    def revive(self, mortal: Collection[str] | None = None) -> None:
        """Start what does not run, of these or of all."""
        for name in self.processes if mortal is None else mortal:
            if not self.running(name):
                self.start(name)

    def start_intruder(self, name: str) -> None:
        """A decode node of another model, called `name`."""
        self.per_node[INTRUDER] = {"name": name, "coordinator": self.where.cluster, **self._other_model}
        self.start(INTRUDER)

    async def intruder_refused(self, within: float) -> None:
        """Wait for its end, which says that its model is not the cluster's."""
        code = await self.ended(INTRUDER, within)
        said = self.tail(INTRUDER)
        assert (code, "the coordinator refused this node" in said) == (2, True), said
        del self._processes[INTRUDER]

    async def whole(self, within: float = 60.0, mortal: Collection[str] = ()) -> None:
        """Wait until every process that runs now has joined and was heard of late, and the cluster is ready. Nobody
        stays stopped meanwhile, and who is `mortal` is started again when it ends: a failpoint that nobody could disarm
        may stop or end its process at any time."""
        async with asyncio.timeout(within):
            while not await self._all_serve():
                self.revive(mortal)
                for name in self.pids():
                    self.cont(name)
                await asyncio.sleep(0.05)

    async def arm(self, node: str, spec: str) -> None:
        """See Cluster. Reaches also who runs and joins anew at this moment: whoever this process, through which all
        links go, has kept waiting for too long."""
        request = cluster_pb2.ArmFailpointsRequest(node=node, spec=spec)
        async with asyncio.timeout(_ARMING):
            while (reached := (await self._call("ArmFailpoints", request)).nodes) < self._called(node):
                await asyncio.sleep(0.05)
        assert reached >= 1, f"no node is called {node}"

    def _called(self, node: str) -> int:
        """How many of those that run."""
        return sum(name.startswith(node) for name in self.pids())

    async def disarm(self, mortal: Collection[str] = ()) -> None:
        """Take every failpoint away, also from a node that joins anew at this moment."""
        reached = 0
        while reached < len(self.processes):
            await self.whole(mortal=mortal)
            answer = await self._call("ArmFailpoints", cluster_pb2.ArmFailpointsRequest(node="", spec=""))
            reached = answer.nodes

    async def _all_serve(self) -> bool:
        try:
            status = await self.status()
        except grpc.RpcError:
            return False
        patience = self.config.silence / 2
        here = {node.name: node.pid for node in status.nodes if node.heard_seconds_ago < patience}
        return status.ready and here == {name: pid for name, pid in self.pids().items() if name in self.nodes}


def _spelled(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
