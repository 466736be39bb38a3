"""A cluster of real processes in which every link between two of them goes through a fault proxy.

Links are named by who dials and who listens: `prefill-0 -> coordinator`, `decode-1 -> coordinator`,
and `prefill -> decode-1` for all writers of one decode node.
"""

import asyncio
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from baton.cli.supervisor import child_specs, ports
from baton.pb import cluster_pb2
from baton.types import Role
from tests.cluster import Cluster
from tests.fault_proxy import Address, FaultProxy

_ARMING_TIMEOUT_SECONDS = 30.0  # seconds
MISMATCHED_NODE = "intruder"

# Everybody loses patience soon, so that a fault and the recovery from it take seconds.
SHORT_TIMEOUTS: dict[str, Any] = {
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


class ProxiedCluster(Cluster):
    """See Cluster. `seed` decides which bits the links corrupt; `other_model` are the settings in
    which an intruder differs. Belongs to the event loop that it was entered on."""

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
        self.node_names = tuple(
            f"{role.value}-{index}"
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
            for index in range(count)
        )
        self.process_names = (child_specs.COORDINATOR, *self.node_names)
        self.proxies: dict[str, FaultProxy] = {}
        self._seed = seed
        self._listen: list[socket.socket] = []
        self._other_model = dict(other_model or {"paced_vocab_size": 31999})
        super().__init__(
            folder,
            per_node={name: (per_node or {}).get(name, {}) for name in self.node_names},
            held_back=(*self.process_names, MISMATCHED_NODE),
            also={MISMATCHED_NODE: "decode-0"},
            wait_ready=False,
            prefill=prefill,
            decode=decode,
            **{**SHORT_TIMEOUTS, **settings},
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            for node in self.node_names:
                await self._proxy_node(node)
            for process in self.process_names:
                self.start(process)
            await self.wait_ready(self._start_timeout)
            await self.wait_all_joined()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        await super().__aexit__(kind, error, trace)
        for link in self.proxies.values():
            await link.close()
        for held in self._listen:
            held.close()

    async def _proxy_node(self, node: str) -> None:
        host, _, port = self.endpoints.cluster.rpartition(":")
        up = await self._open_proxy(f"{node} -> {child_specs.COORDINATOR}", (host, int(port)))
        self.per_node[node]["coordinator"] = _format_address(up.address)
        if node.startswith(Role.DECODE.value):
            held = ports.reserve_port("127.0.0.1", 0, "--listen")
            self._listen.append(held)
            listen: Address = held.getsockname()
            across = await self._open_proxy(f"prefill -> {node}", listen)
            self.per_node[node] |= {
                "listen": _format_address(listen),
                "advertise": _format_address(across.address),
            }

    async def _open_proxy(self, name: str, upstream: Address) -> FaultProxy:
        link = self.proxies[name] = await FaultProxy.open(
            name, upstream, seed=self._seed + len(self.proxies)
        )
        return link

    # what rounds and scenarios ask for

    def node_settings(self, node: str) -> dict[str, object]:
        """The settings that this node alone is started with."""
        return self.per_node[node]

    def is_running(self, name: str) -> bool:
        return name in self.get_pids()

    def start_missing(self, mortal: Collection[str] | None = None) -> None:
        """Start what does not run, of these or of all."""
        for name in self.process_names if mortal is None else mortal:
            if not self.is_running(name):
                self.start(name)

    def start_mismatched_node(self, name: str) -> None:
        """A decode node of another model, called `name`."""
        self.per_node[MISMATCHED_NODE] = {
            "name": name,
            "coordinator": self.endpoints.cluster,
            **self._other_model,
        }
        self.start(MISMATCHED_NODE)

    async def wait_mismatched_node_refused(self, within: float) -> None:
        """Wait for its end, which says that its model is not the cluster's."""
        code = await self.wait_for_exit(MISMATCHED_NODE, within)
        said = self.log_tail(MISMATCHED_NODE)
        assert (code, "the coordinator refused this node" in said) == (2, True), said
        del self._processes[MISMATCHED_NODE]

    async def wait_all_joined(self, within: float = 60.0, mortal: Collection[str] = ()) -> None:
        """Wait until every process that runs now has joined and was heard of late, and the cluster
        is ready. Nobody stays stopped meanwhile, and who is `mortal` is started again when it ends:
        a failpoint that nobody could disarm may stop or end its process at any time."""
        async with asyncio.timeout(within):
            while not await self._are_all_serving():
                self.start_missing(mortal)
                for name in self.get_pids():
                    self.resume(name)
                await asyncio.sleep(0.05)

    async def arm_failpoints(self, node: str, spec: str) -> None:
        """See Cluster. Reaches also who runs and joins anew at this moment: whoever this process,
        through which all links go, has kept waiting for too long."""
        request = cluster_pb2.ArmFailpointsRequest(node=node, spec=spec)
        async with asyncio.timeout(_ARMING_TIMEOUT_SECONDS):
            while (
                reached := (await self._call_cluster_service("ArmFailpoints", request)).nodes
            ) < self._count_running(node):
                await asyncio.sleep(0.05)
        assert reached >= 1, f"no node is called {node}"

    def _count_running(self, node: str) -> int:
        """How many of those that run."""
        return sum(name.startswith(node) for name in self.get_pids())

    async def disarm_failpoints(self, mortal: Collection[str] = ()) -> None:
        """Take every failpoint away, also from a node that joins anew at this moment."""
        reached = 0
        while reached < len(self.process_names):
            await self.wait_all_joined(mortal=mortal)
            answer = await self._call_cluster_service(
                "ArmFailpoints", cluster_pb2.ArmFailpointsRequest(node="", spec="")
            )
            reached = answer.nodes

    async def _are_all_serving(self) -> bool:
        try:
            status = await self.get_status()
        except grpc.RpcError:
            return False
        patience = self.config.silence / 2
        here = {node.name: node.pid for node in status.nodes if node.heard_seconds_ago < patience}
        return status.ready and here == {
            name: pid for name, pid in self.get_pids().items() if name in self.node_names
        }


def _format_address(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
