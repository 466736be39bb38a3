"""baton.v1.Cluster: what operators ask."""

from baton.config import Config, model_name
from baton.errors import BatonError, InvalidRequest, NotAvailable
from baton.failpoints import FAILPOINTS, Failpoints
from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from coordinator.auth import AdminGate
from coordinator.core.registry import Node
from coordinator.dispatcher import Dispatcher
from coordinator.grpc_terms import Context, require_admin, told
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.warmup import Readiness

COORDINATOR = "coordinator"  # its name among the nodes, for failpoints


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(
        self, config: Config, dispatcher: Dispatcher, ledgers: Ledgers, readiness: Readiness, metrics: Metrics
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledgers = ledgers
        self._readiness = readiness
        self._metrics = metrics
        self._gate = AdminGate(config.admin_token)

    async def Status(self, _: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        async with told(context):
            require_admin(context, self._gate)
            return self.status()

    async def Ledger(self, _: pb.LedgerRequest, context: Context) -> pb.LedgerResponse:
        async with told(context):
            require_admin(context, self._gate)
            return await self._ledgers.collect()

    async def ArmFailpoints(self, request: pb.ArmFailpointsRequest, context: Context) -> pb.ArmFailpointsResponse:
        async with told(context):
            require_admin(context, self._gate)
            return pb.ArmFailpointsResponse(nodes=self.arm(request.node, request.spec))

    def status(self) -> pb.StatusResponse:
        brain = self._dispatcher.brain
        ready, reason = self._readiness.state()
        nodes = sorted(brain.registry.nodes.values(), key=lambda node: node.info.name)
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=model_name(self._config),
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
