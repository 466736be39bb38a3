"""The cluster, its nodes and pools as operators see them, in messages of the Cluster service."""

from baton.cluster_link.messages import POOL_ROLE
from baton.cluster_link.stats_conversion import stats_to_pb
from baton.config.coordinator_config import CoordinatorConfig
from baton.pb import cluster_pb2 as pb
from baton.types import NodeName
from baton.version import package_version
from coordinator.core.brain import Brain
from coordinator.core.membership.node_registry import NodeMember, NodeServiceState
from coordinator.core.membership.prefix_directory import PoolMember
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.degradation_view import degradation_to_pb, drain_warning, list_notices
from coordinator.operators.metrics import CoordinatorMetrics
from coordinator.operators.ratio_operations import RatioOperations
from coordinator.readiness import Readiness


class StatusView:
    """Builds the status of the cluster. Runs on the coordinator's event loop."""

    def __init__(
        self,
        config: CoordinatorConfig,
        dispatcher: Dispatcher,
        readiness: Readiness,
        metrics: CoordinatorMetrics,
        ratio: RatioOperations,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._readiness = readiness
        self._metrics = metrics
        self._ratio = ratio

    def build_status(self) -> pb.StatusResponse:
        brain, now = self._dispatcher.brain, self._dispatcher.clock()
        ready, reason = self._readiness.state()
        nodes = sorted(brain.node_registry.nodes.values(), key=lambda node: node.info.name)
        pools = sorted(
            brain.placement_state.pools.members.values(), key=lambda pool: pool.info.name
        )
        return pb.StatusResponse(
            ready=ready,
            reason=reason,
            mode=self._dispatcher.mode,
            model=self._config.public_model_name,
            queued=brain.queued_requests,
            running=brain.running_requests,
            nodes=[node_status_to_pb(brain, node, now) for node in nodes]
            + [pool_status_to_pb(pool, now) for pool in pools],
            counters=self._metrics.get_counter_values(),
            clock_seconds=now,
            latency=self._metrics.get_latency_summary(),
            version=package_version(),
            ratio=self._ratio.get_ratio(),
            notices=list_notices(brain),
            degradation=degradation_to_pb(brain.degradation, now),
            pressure=brain.degradation.last_sample.pressure or 0.0,
        )


def node_status_to_pb(brain: Brain, node: NodeMember, now: float) -> pb.NodeStatus:
    info = node.info
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
        stats=stats_to_pb(node.stats) if node.stats else None,
        service=brain.get_service_state(node).value,
        drain_seconds_left=max(0.0, until - now) if until is not None else 0.0,
    )


def pool_status_to_pb(pool: PoolMember, now: float) -> pb.NodeStatus:
    info = pool.info
    return pb.NodeStatus(
        name=info.name,
        incarnation=pool.incarnation,
        role=POOL_ROLE,
        host_id=info.host_id,
        address=info.endpoint,
        pid=info.pid,
        joined_seconds_ago=now - pool.joined_at,
        heard_seconds_ago=now - pool.heard_at,
        stats=stats_to_pb(pool.stats) if pool.stats else None,
        service=NodeServiceState.IN_SERVICE.value,
    )


def drain_response_to_pb(brain: Brain, name: str) -> pb.DrainResponse:
    """The state of a node by name; a drained name may belong to no node at the moment."""
    node = brain.node_registry.by_name(NodeName(name))
    service = brain.get_service_state(node) if node else NodeServiceState.IN_SERVICE
    return pb.DrainResponse(
        node=name,
        service=service.value,
        placed=brain.count_attempts(node.incarnation) if node else 0,
        warning=drain_warning(brain),
    )
