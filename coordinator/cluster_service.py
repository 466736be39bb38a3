"""baton.v1.Cluster: what operators ask."""

import hmac
import ipaddress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from baton.config import Config
from baton.errors import BatonError, InvalidRequest, NotAvailable, Unauthenticated
from baton.failpoints import FAILPOINTS, Failpoints
from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from coordinator.core.registry import Node
from coordinator.dispatcher import Dispatcher
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.warmup import Readiness

COORDINATOR = "coordinator"  # its name among the nodes, for failpoints

Context = Any  # grpc.aio.ServicerContext, which ships without types


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(
        self, config: Config, dispatcher: Dispatcher, ledgers: Ledgers, readiness: Readiness, metrics: Metrics
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledgers = ledgers
        self._readiness = readiness
        self._metrics = metrics

    async def Status(self, _: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        await self._authorize(context)
        return self.status()

    async def Ledger(self, _: pb.LedgerRequest, context: Context) -> pb.LedgerResponse:
        await self._authorize(context)
        return await self._ledgers.collect()

    async def ArmFailpoints(self, request: pb.ArmFailpointsRequest, context: Context) -> pb.ArmFailpointsResponse:
        await self._authorize(context)
        try:
            return pb.ArmFailpointsResponse(nodes=self.arm(request.node, request.spec))
        except BatonError as error:
            await _abort(context, error)
            raise

    def status(self) -> pb.StatusResponse:
        brain = self._dispatcher.brain
        ready, reason = self._readiness.state()
        nodes = sorted(brain.registry.nodes.values(), key=lambda node: node.info.name)
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=self._config.served_model_name or Path(self._config.model).name,
            queued=brain.queued,
            running=brain.running,
            nodes=[self._node_status(node) for node in nodes],
            counters=self._metrics.counters(),
        )

    def arm(self, prefix: str, spec: str) -> int:
        """Replace what is armed on every process whose name starts with `prefix`. Returns how many there are. Raises
        NotAvailable without --failpoints-rpc, InvalidRequest for a bad spec."""
        if not self._config.failpoints_rpc:
            raise NotAvailable("failpoints cannot be armed: the cluster runs without --failpoints-rpc")
        try:
            Failpoints(spec)
        except BatonError as error:
            raise InvalidRequest(error.message, param="spec") from None
        nodes = self._dispatcher.brain.registry.named(prefix)
        for node in nodes:
            self._dispatcher.links[node.incarnation].send(pb.CoordinatorMessage(arm=pb.Arm(spec=spec)))
        if COORDINATOR.startswith(prefix):
            FAILPOINTS.arm(spec)
        return len(nodes) + COORDINATOR.startswith(prefix)

    def _node_status(self, node: Node) -> pb.NodeStatus:
        now, info = self._dispatcher.clock(), node.info
        return pb.NodeStatus(
            name=info.name,
            incarnation=node.incarnation,
            role=info.role.value,
            host_id=info.host_id,
            address=info.transfer_endpoint,
            pid=info.pid,
            joined_seconds_ago=now - node.joined_at,
            heard_seconds_ago=now - node.heard_at,
            placed=self._dispatcher.brain.placed_on(node.incarnation),
            stats=node.stats,
        )

    async def _authorize(self, context: Context) -> None:
        """With an admin token everybody needs it; without one only this machine may ask."""
        expected = self._config.admin_token
        given = str(dict(context.invocation_metadata()).get("authorization", ""))
        if expected and not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            await _abort(context, Unauthenticated("metadata authorization must be 'Bearer ' and the --admin-token"))
        if not expected and not is_loopback(context.peer()):
            await _abort(context, Unauthenticated("without --admin-token only loopback peers may call this"))


def is_loopback(peer: str) -> bool:
    """Of grpc's name for a peer: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`, `unix:...`."""
    kind, _, address = unquote(peer).partition(":")
    if kind == "unix":
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


async def _abort(context: Context, error: BatonError) -> None:
    await context.abort(getattr(grpc.StatusCode, error.grpc_code), error.message)
