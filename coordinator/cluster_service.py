"""baton.v1.Cluster: what operators ask, here and on the admin port."""

import importlib.metadata
import math
from contextlib import aclosing

from prometheus_client import generate_latest

from baton.config import MAX_SECONDS, Config, model_name
from baton.errors import BatonError, InvalidRequest, NotAvailable, NotFound
from baton.failpoints import FAILPOINTS, Failpoints
from baton.pb import cluster_pb2 as pb
from baton.pb import cluster_pb2_grpc
from baton.ratio import Split
from baton.slo import Slo, parse_slo
from baton.types import NodeName
from coordinator.auth import AdminGate
from coordinator.core.client_ids import ClientIds, request_id_of
from coordinator.core.drains import Service
from coordinator.core.pools import ROLE, PoolMember
from coordinator.core.registry import Node
from coordinator.degradation_view import degradation_to_pb, drain_warning, notices
from coordinator.dispatcher import Dispatcher
from coordinator.grpc_terms import Context, require_admin, told
from coordinator.ledgers import Ledgers
from coordinator.metrics import Metrics
from coordinator.ratio_view import advice_to_pb, ratio_to_pb
from coordinator.warmup import Readiness
from coordinator.watchers import Watchers

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
        self.client_ids = ClientIds()
        self._gate = AdminGate(config.admin_token)
        self._watchers = Watchers(self.status)
        dispatcher.on_change.append(self._watchers.changed)
        dispatcher.on_end.append(lambda _: self._watchers.changed())

    def authenticate(self, context: Context) -> None:
        """Raises Unauthenticated."""
        require_admin(context, self._gate)

    async def Status(self, _: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        async with told(context):
            return self.status()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        async with told(context):
            async with aclosing(self._watchers.watch(request.interval_seconds)) as answers:
                async for answer in answers:
                    await context.write(answer)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        async with told(context):
            return self.explain(request.request_id)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        async with told(context):
            timeout = request.timeout_seconds if request.HasField("timeout_seconds") else None
            return self.drain(request.node, timeout)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.DrainResponse:
        async with told(context):
            return self.undrain(request.node)

    async def GetRatio(self, _: pb.GetRatioRequest, context: Context) -> pb.Ratio:
        async with told(context):
            return self.ratio()

    async def SetRatio(self, request: pb.SetRatioRequest, context: Context) -> pb.Ratio:
        async with told(context):
            patience = request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            return self.set_ratio(Split(request.prefill, request.decode), patience)

    async def AdviseRatio(self, request: pb.AdviseRatioRequest, context: Context) -> pb.RatioAdvice:
        async with told(context):
            return self.advise_ratio(_objective(request.slo))

    async def AutoRatio(self, request: pb.AutoRatioRequest, context: Context) -> pb.Ratio:
        async with told(context):
            patience = request.flip_timeout_seconds if request.HasField("flip_timeout_seconds") else None
            return self.auto_ratio(_objective(request.slo), patience)

    async def ManualRatio(self, _: pb.ManualRatioRequest, context: Context) -> pb.Ratio:
        async with told(context):
            return self.manual_ratio()

    async def Ledger(self, _: pb.LedgerRequest, context: Context) -> pb.LedgerResponse:
        async with told(context):
            return await self.ledger()

    async def ArmFailpoints(self, request: pb.ArmFailpointsRequest, context: Context) -> pb.ArmFailpointsResponse:
        async with told(context):
            return pb.ArmFailpointsResponse(nodes=self.arm(request.node, request.spec))

    def status(self) -> pb.StatusResponse:
        brain = self._dispatcher.brain
        ready, reason = self._readiness.state()
        nodes = sorted(brain.registry.nodes.values(), key=lambda node: node.info.name)
        pools = sorted(brain.knowledge.pools.members.values(), key=lambda pool: pool.info.name)
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=model_name(self._config),
            queued=brain.queued,
            running=brain.running,
            nodes=[self._node_status(node) for node in nodes] + [self._pool_status(pool) for pool in pools],
            counters=self._metrics.counters(),
            clock_seconds=self._dispatcher.clock(),
            latency=self._metrics.latency(),
            version=version(),
            ratio=self.ratio(),
            notices=notices(brain),
            degradation=degradation_to_pb(brain.degradation, self._dispatcher.clock()),
            pressure=brain.degradation.last.pressure or 0.0,
        )

    async def ledger(self) -> pb.LedgerResponse:
        return await self._ledgers.collect()

    def metrics(self) -> bytes:
        return generate_latest(self._metrics.registry)

    def explain(self, request: str) -> pb.ExplainResponse:
        """By the id of a request, as it is or as it stands in an answer's body, or by the id that its client gave it.
        Raises NotFound, or InvalidRequest if several requests have that one."""
        try:
            return self._dispatcher.explain(request_id_of(request))
        except NotFound:
            found = self.client_ids.find_request(request)
            if found is None:
                raise
            return self._dispatcher.explain(found)

    def drain(self, name: str, timeout: float | None) -> pb.DrainResponse:
        """Returns at once; see `Brain.drain_node`. Raises NotFound, InvalidRequest."""
        _require_seconds("timeout", timeout)
        self._dispatcher.drain_node(NodeName(name), timeout)
        return self._drain_response(name)

    def undrain(self, name: str) -> pb.DrainResponse:
        """Raises NotFound."""
        self._dispatcher.undrain_node(NodeName(name))
        return self._drain_response(name)

    def ratio(self) -> pb.Ratio:
        return ratio_to_pb(self._dispatcher.brain, self._dispatcher.clock())

    def set_ratio(self, target: Split, patience: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.set_ratio`. Raises InvalidRequest."""
        _require_seconds("flip_timeout", patience)
        self._dispatcher.set_ratio(target, patience)
        return self.ratio()

    def advise_ratio(self, slo: Slo | None) -> pb.RatioAdvice:
        """See `Pilot.advise`. Raises Unavailable, InvalidRequest."""
        brain = self._dispatcher.brain
        return advice_to_pb(brain.pilot.advise(slo, self._dispatcher.clock()), brain.queued)

    def auto_ratio(self, slo: Slo | None, patience: float | None) -> pb.Ratio:
        """Returns at once; see `Brain.auto_ratio`. Raises InvalidRequest."""
        _require_seconds("flip_timeout", patience)
        self._dispatcher.auto_ratio(slo, patience)
        return self.ratio()

    def manual_ratio(self) -> pb.Ratio:
        self._dispatcher.manual_ratio()
        return self.ratio()

    def close(self) -> None:
        """Watches end."""
        self._watchers.close()

    def _drain_response(self, name: str) -> pb.DrainResponse:
        """A name that was drained may belong to no node at this moment."""
        brain = self._dispatcher.brain
        node = brain.registry.called(NodeName(name))
        return pb.DrainResponse(
            node=name,
            service=brain.service(node).value if node else Service.IN.value,
            placed=brain.placed_on(node.incarnation) if node else 0,
            warning=drain_warning(brain),
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
        nodes = [one for one in self._dispatcher.brain.members() if one.info.name.startswith(prefix)]
        for node in nodes:
            self._dispatcher.links[node.incarnation].send(pb.CoordinatorMessage(arm=pb.Arm(spec=spec)))
        if COORDINATOR.startswith(prefix):
            FAILPOINTS.arm(spec)
        return len(nodes) + COORDINATOR.startswith(prefix)

    def _node_status(self, node: Node) -> pb.NodeStatus:
        brain, now, info = self._dispatcher.brain, self._dispatcher.clock(), node.info
        until = brain.registry.drains.until(info.name)
        return pb.NodeStatus(
            name=info.name,
            incarnation=node.incarnation,
            role=info.role.value,
            host_id=info.host_id,
            address=info.transfer_endpoint,
            pid=info.pid,
            joined_seconds_ago=now - node.joined_at,
            heard_seconds_ago=now - node.heard_at,
            placed=brain.placed_on(node.incarnation),
            stats=node.stats,
            service=brain.service(node).value,
            drain_seconds_left=max(0.0, until - now) if until is not None else 0.0,
        )

    def _pool_status(self, pool: PoolMember) -> pb.NodeStatus:
        now, info = self._dispatcher.clock(), pool.info
        return pb.NodeStatus(
            name=info.name,
            incarnation=pool.incarnation,
            role=ROLE,
            host_id=info.host_id,
            address=info.endpoint,
            pid=info.pid,
            joined_seconds_ago=now - pool.joined_at,
            heard_seconds_ago=now - pool.heard_at,
            stats=pool.stats,
            service=Service.IN.value,
        )


def _objective(text: str) -> Slo | None:
    """Raises InvalidRequest."""
    return parse_slo(text) if text else None


def _require_seconds(param: str, seconds: float | None) -> None:
    if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS):
        raise InvalidRequest(f"{param}_seconds is {seconds:g}: it must be 0 to {MAX_SECONDS:g}", param=param)


def version() -> str:
    """Of this installation."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
