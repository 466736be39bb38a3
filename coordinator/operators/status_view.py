"""Converts the state of the cluster for operators: members, drains and degraded service."""

from collections.abc import Iterator

from baton.pb import cluster_pb2 as pb
from baton.types import NodeName
from coordinator.core.admission.degradation import DegradationController, DegradationStep
from coordinator.core.brain import Brain
from coordinator.core.membership.node_registry import NodeMember, NodeServiceState
from coordinator.core.membership.prefix_directory import POOL_ROLE, PoolMember

_STEP_EFFECTS = {
    DegradationStep.SHED_LOWEST: "new requests of the lowest class are refused",
    DegradationStep.SMALLER_TOKEN_BUDGET: "tenants with tokens_per_second get half of it",
    DegradationStep.CAPPED_OUTPUT: "new requests get at most --degraded-max-tokens tokens",
    DegradationStep.LOCAL_PREFILL_ONLY: (
        "hand-offs fail and are given up: decode nodes compute every prompt"
    ),
}


def node_to_pb(node: NodeMember, brain: Brain, now: float) -> pb.NodeStatus:
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


def pool_to_pb(pool: PoolMember, now: float) -> pb.NodeStatus:
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


def drain_to_pb(name: str, brain: Brain) -> pb.DrainResponse:
    """The state of a node by name; a drained name may belong to no node at the moment."""
    node = brain.node_registry.by_name(NodeName(name))
    return pb.DrainResponse(
        node=name,
        service=brain.get_service_state(node).value if node else NodeServiceState.IN_SERVICE.value,
        placed=brain.count_attempts(node.incarnation) if node else 0,
        warning=_drain_warning(brain),
    )


def list_notices(brain: Brain) -> list[str]:
    """Return one sentence for each way in which service is degraded at the moment."""
    found = [
        f"degraded ({step.value}): {_STEP_EFFECTS[step]}" for step in brain.degradation.active_steps
    ]
    if brain.why_no_prefill():
        found.append("no prefill node serves: decode nodes compute every prompt")
    return found


def _drain_warning(brain: Brain) -> str:
    """Describe what is missing while nodes are drained; "" if nothing is."""
    if missing := brain.why_not_serving():
        return f"{missing}: requests wait, and new ones get 503, until one serves"
    missing = brain.why_no_prefill()
    return f"{missing}: decode nodes compute every prompt until one serves" if missing else ""


def degradation_to_pb(
    degradation: DegradationController, now: float
) -> Iterator[pb.DegradationStep]:
    """Yield every step, in the order in which the steps are taken."""
    for step in DegradationStep:
        since = degradation.active_steps.get(step)
        yield pb.DegradationStep(
            step=step.value,
            active=since is not None,
            seconds=0.0 if since is None else now - since,
            cannot_help=""
            if since is not None
            else degradation.last_sample.unhelpful_steps.get(step, ""),
        )
