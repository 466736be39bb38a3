"""baton.v1.Cluster: what operators ask, here and on the admin port."""

import importlib.metadata
import math
from contextlib import aclosing

from prometheus_client import generate_latest

from baton.config.settings import MAX_SECONDS, Config, get_served_model_name
from baton.errors import BatonError, InvalidRequest, NotFound, NotSupported
from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from baton.process.failpoints import FAILPOINTS, Failpoints
from baton.role_split import RoleSplit
from baton.slo import Slo, parse_slo
from baton.types import NodeName
from coordinator.core.membership.drains import NodeServiceState
from coordinator.core.membership.node_registry import NodeMember
from coordinator.core.membership.pool_registry import POOL_ROLE, PoolMember
from coordinator.frontend.auth import AdminAuthenticator
from coordinator.frontend.grpc.errors import ServicerContext, check_admin_call, grpc_errors
from coordinator.node_links.cluster_readiness import ClusterReadiness
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.node_links.ledger_collector import LedgerCollector
from coordinator.operators.client_ids import ClientIds, parse_request_id
from coordinator.operators.degradation_view import degradation_to_pb, drain_warning, list_notices
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.ratio_view import advice_to_pb, ratio_to_pb
from coordinator.operators.status_watchers import StatusWatchers

COORDINATOR = "coordinator"  # its name among the nodes, for failpoints


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        ledgers: LedgerCollector,
        readiness: ClusterReadiness,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._ledger_collector = ledgers
        self._readiness = readiness
        self._metrics = metrics
        self.client_request_ids = ClientIds()
        self._admin_auth = AdminAuthenticator(config.admin_token)
        self._watchers = StatusWatchers(self.get_status)
        dispatcher.on_cluster_change.append(self._watchers.notify_change)
        dispatcher.on_request_end.append(lambda _: self._watchers.notify_change())

    def authenticate(self, context: ServicerContext) -> None:
        """Raises Unauthenticated."""
        check_admin_call(context, self._admin_auth)

    async def Status(self, _: pb.StatusRequest, context: ServicerContext) -> pb.StatusResponse:
        async with grpc_errors(context):
            return self.get_status()

    async def Watch(self, request: pb.WatchRequest, context: ServicerContext) -> None:
        async with grpc_errors(context):
            async with aclosing(self._watchers.watch_status(request.interval_seconds)) as answers:
                async for answer in answers:
                    await context.write(answer)

    async def Explain(
        self, request: pb.ExplainRequest, context: ServicerContext
    ) -> pb.ExplainResponse:
        async with grpc_errors(context):
            return self.explain_request(request.request_id)

    async def Drain(self, request: pb.DrainRequest, context: ServicerContext) -> pb.DrainResponse:
        async with grpc_errors(context):
            timeout = request.timeout_seconds if request.HasField("timeout_seconds") else None
            return self.drain_node(request.node, timeout)

    async def Undrain(
        self, request: pb.UndrainRequest, context: ServicerContext
    ) -> pb.DrainResponse:
        async with grpc_errors(context):
            return self.undrain_node(request.node)

    async def GetRatio(self, _: pb.GetRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            return self.get_ratio()

    async def SetRatio(self, request: pb.SetRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            patience = (
                request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            )
            return self.set_ratio(RoleSplit(request.prefill, request.decode), patience)

    async def AdviseRatio(
        self, request: pb.AdviseRatioRequest, context: ServicerContext
    ) -> pb.RatioAdvice:
        async with grpc_errors(context):
            return self.advise_ratio(_parse_slo_or_none(request.slo))

    async def AutoRatio(self, request: pb.AutoRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            patience = (
                request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            )
            return self.set_auto_ratio(_parse_slo_or_none(request.slo), patience)

    async def ManualRatio(self, _: pb.ManualRatioRequest, context: ServicerContext) -> pb.Ratio:
        async with grpc_errors(context):
            return self.set_manual_ratio()

    async def Ledger(self, _: pb.LedgerRequest, context: ServicerContext) -> pb.LedgerResponse:
        async with grpc_errors(context):
            return await self.collect_ledgers()

    async def ArmFailpoints(
        self, request: pb.ArmFailpointsRequest, context: ServicerContext
    ) -> pb.ArmFailpointsResponse:
        async with grpc_errors(context):
            return pb.ArmFailpointsResponse(nodes=self.arm_failpoints(request.node, request.spec))

    def get_status(self) -> pb.StatusResponse:
        brain = self._dispatcher.brain
        ready, reason = self._readiness.state()
        nodes = sorted(brain.node_registry.nodes.values(), key=lambda node: node.info.name)
        pools = sorted(
            brain.placement_state.pools.members.values(), key=lambda pool: pool.info.name
        )
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=get_served_model_name(self._config),
            queued=brain.queued_requests,
            running=brain.running_requests,
            nodes=[self._node_status(node) for node in nodes]
            + [self._pool_status(pool) for pool in pools],
            counters=self._metrics.get_counter_values(),
            clock_seconds=self._dispatcher.clock(),
            latency=self._metrics.get_latency_summary(),
            version=package_version(),
            ratio=self.get_ratio(),
            notices=list_notices(brain),
            degradation=degradation_to_pb(brain.degradation, self._dispatcher.clock()),
            pressure=brain.degradation.last_sample.pressure or 0.0,
        )

    async def collect_ledgers(self) -> pb.LedgerResponse:
        return await self._ledger_collector.collect_ledgers()

    def render_metrics(self) -> bytes:
        return generate_latest(self._metrics.registry)

    def explain_request(self, request: str) -> pb.ExplainResponse:
        """By the id of a request, as it is or as it stands in an answer's body, or by the id that
        its client gave it. Raises NotFound, or InvalidRequest if several requests have that one."""
        try:
            return self._dispatcher.explain_request(parse_request_id(request))
        except NotFound:
            found = self.client_request_ids.find_request(request)
            if found is None:
                raise
            return self._dispatcher.explain_request(found)

    def drain_node(self, name: str, timeout: float | None) -> pb.DrainResponse:
        """Returns at once; see `Brain.drain_node`. Raises NotFound, InvalidRequest."""
        _check_seconds("timeout", timeout)
        self._dispatcher.drain_node(NodeName(name), timeout)
        return self._drain_response(name)

    def undrain_node(self, name: str) -> pb.DrainResponse:
        """Raises NotFound."""
        self._dispatcher.undrain_node(NodeName(name))
        return self._drain_response(name)

    def get_ratio(self) -> pb.Ratio:
        return ratio_to_pb(self._dispatcher.brain, self._dispatcher.clock())

    def set_ratio(self, target: RoleSplit, patience: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_ratio`. Raises InvalidRequest."""
        _check_seconds("flip_timeout", patience)
        self._dispatcher.set_ratio(target, patience)
        return self.get_ratio()

    def advise_ratio(self, slo: Slo | None) -> pb.RatioAdvice:
        """See `RatioController.get_advice`. Raises Unavailable, InvalidRequest."""
        brain = self._dispatcher.brain
        return advice_to_pb(
            brain.ratio_controller.get_advice(slo, self._dispatcher.clock()), brain.queued_requests
        )

    def set_auto_ratio(self, slo: Slo | None, patience: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.auto_ratio`. Raises InvalidRequest."""
        _check_seconds("flip_timeout", patience)
        self._dispatcher.set_auto_ratio(slo, patience)
        return self.get_ratio()

    def set_manual_ratio(self) -> pb.Ratio:
        self._dispatcher.set_manual_ratio()
        return self.get_ratio()

    def close(self) -> None:
        """Watches end."""
        self._watchers.close()

    def _drain_response(self, name: str) -> pb.DrainResponse:
        """A name that was drained may belong to no node at this moment."""
        brain = self._dispatcher.brain
        node = brain.node_registry.by_name(NodeName(name))
        return pb.DrainResponse(
            node=name,
            service=brain.get_service_state(node).value
            if node
            else NodeServiceState.IN_SERVICE.value,
            placed=brain.count_attempts(node.incarnation) if node else 0,
            warning=drain_warning(brain),
        )

    def arm_failpoints(self, prefix: str, spec: str) -> int:
        """Replace what is armed on every process whose name starts with `prefix`. Returns how many
        there are. Raises NotAvailable without --failpoints-rpc, InvalidRequest for a bad spec."""
        if not self._config.failpoints_rpc:
            raise NotSupported(
                "failpoints cannot be armed: the cluster runs without --failpoints-rpc"
            )
        try:
            Failpoints(spec)
        except BatonError as error:
            raise InvalidRequest(error.message, param="spec") from None
        nodes = [
            one for one in self._dispatcher.brain.list_members() if one.info.name.startswith(prefix)
        ]
        for node in nodes:
            self._dispatcher.node_connections[node.incarnation].send_message(
                pb.CoordinatorMessage(arm=pb.Arm(spec=spec))
            )
        if COORDINATOR.startswith(prefix):
            FAILPOINTS.arm(spec)
        return len(nodes) + COORDINATOR.startswith(prefix)

    def _node_status(self, node: NodeMember) -> pb.NodeStatus:
        brain, now, info = self._dispatcher.brain, self._dispatcher.clock(), node.info
        until = brain.node_registry.drains.get_deadline(info.name)
        return pb.NodeStatus(
            name=info.name,
            incarnation=node.incarnation,
            role=info.role.value,
            host_id=info.host_id,
            address=info.transfer_endpoint,
            pid=info.pid,
            joined_seconds_ago=now - node.joined_at,
            heard_seconds_ago=now - node.heard_at,
            placed=brain.count_attempts(node.incarnation),
            stats=node.stats,
            service=brain.get_service_state(node).value,
            drain_seconds_left=max(0.0, until - now) if until is not None else 0.0,
        )

    def _pool_status(self, pool: PoolMember) -> pb.NodeStatus:
        now, info = self._dispatcher.clock(), pool.info
        return pb.NodeStatus(
            name=info.name,
            incarnation=pool.incarnation,
            role=POOL_ROLE,
            host_id=info.host_id,
            address=info.endpoint,
            pid=info.pid,
            joined_seconds_ago=now - pool.joined_at,
            heard_seconds_ago=now - pool.heard_at,
            stats=pool.stats,
            service=NodeServiceState.IN_SERVICE.value,
        )


def _parse_slo_or_none(text: str) -> Slo | None:
    """Raises InvalidRequest."""
    return parse_slo(text) if text else None


def _check_seconds(param: str, seconds: float | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(
            f"{param}_seconds is {seconds:g}: it must be 0 to {MAX_SECONDS:g}", param=param
        )


def package_version() -> str:
    """Of this installation."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
