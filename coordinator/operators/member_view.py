"""Nodes and pools as operators see them, in the protobuf messages of the Cluster service."""

from baton.cluster_link.messages import POOL_ROLE
from baton.pb import cluster_pb2 as pb
from baton.types import NodeName
from coordinator.core.brain import Brain
from coordinator.core.membership.node_registry import NodeMember, NodeServiceState
from coordinator.core.membership.prefix_directory import PoolMember
from coordinator.operators.degradation_view import drain_warning


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
        stats=node.stats,
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
        stats=pool.stats,
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
