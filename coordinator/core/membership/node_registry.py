"""Keeps the nodes that have joined: their identity, last message and last heartbeat.

The cluster's model identity is that of its nodes. The first node sets it, and it stays as long as a
node is a member or a request that was placed on one is running. A name belongs to one process as
long as messages of that process arrive.

`DrainSet` has the nodes taken out of service, by name, so that a restarted node stays out until it
is put back. The set is not stored: a coordinator that restarts has forgotten it.

`ContextCapacity` says how long a request may be: as long as the largest decode node can hold.
Prefill nodes do not limit requests, since a decode node computes what no prefill node can hold. A
node that joins with a smaller cache or `--max-model-len` takes nothing away: requests that it
cannot hold are placed elsewhere. A node that left still counts for a while, so that its restart
does not reject requests as too long. Requests that no present node can hold wait, and block no
others.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from baton.cluster_link.messages import JoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.errors import InvalidRequest, NodeFailed, NodeLost, NodeStalled
from baton.kv.blocks import KVLayout
from baton.limits import ModelBounds
from baton.models.model_identity import ModelIdentity
from baton.types import Incarnation, NodeName, PeerAddress, Role
from coordinator.core.membership.join_checks import (
    ServedModel,
    require_cluster_model,
    require_free_name,
    require_served_model,
    require_valid_join,
)

MAX_DRAINED_NODES = 1024
MIN_QUIET_REPORTS = 2  # the second of them was sent after every order had arrived


class NodeServiceState(Enum):
    """Whether a node is given new work, and if not, whether it still has some."""

    IN_SERVICE = "in"
    DRAINING = "draining"
    DRAINED = "drained"
    SWITCHING = "switching"  # to another role


class DrainSet:
    """Names that get no new work, with the time at which their remaining work is placed again."""

    def __init__(self) -> None:
        self._deadlines: dict[NodeName, float | None] = {}
        self.names = self._deadlines.keys()

    def __contains__(self, name: NodeName) -> bool:
        return name in self._deadlines

    def start_drain(self, name: NodeName, until: float | None) -> None:
        """Give the node no new work, and have the rest placed again at `until` (None: never). A
        second call replaces `until`. Raises InvalidRequest if too many names are drained."""
        if name not in self._deadlines and len(self._deadlines) >= MAX_DRAINED_NODES:
            raise InvalidRequest(
                f"{MAX_DRAINED_NODES} names are drained, which is the limit: undrain some",
                param="node",
            )
        self._deadlines[name] = until

    def end_drain(self, name: NodeName) -> bool:
        """Put the name back in service; return whether it was drained."""
        known = name in self._deadlines
        self._deadlines.pop(name, None)
        return known

    def get_deadline(self, name: NodeName) -> float | None:
        return self._deadlines.get(name)

    def next_deadline(self) -> float | None:
        return min((until for until in self._deadlines.values() if until is not None), default=None)

    def pop_due(self, now: float) -> list[NodeName]:
        """Return the names whose time is over; each is returned once."""
        found = [
            name for name, until in self._deadlines.items() if until is not None and until <= now
        ]
        for name in found:
            self._deadlines[name] = None
        return found


def is_node_empty(attempts: int, quiet_reports: int, stats: NodeStats | None) -> bool:
    """Return whether a node holds no work, by the coordinator's books and by its own reports."""
    if attempts or quiet_reports < MIN_QUIET_REPORTS or stats is None:
        return False
    held = (
        stats.blocks_reserved
        + stats.blocks_writing
        + stats.blocks_in_use
        + stats.blocks_quarantined
    )
    return not (held or stats.waiting or stats.running)


@dataclass(slots=True)
class NodeMember:
    """One membership of a node, from a join to the loss of its connection."""

    info: JoinInfo
    incarnation: Incarnation
    joined_at: float
    heard_at: float
    model_digest: bytes  # of the model identity that it announced
    stats: NodeStats | None = None  # None until its first heartbeat
    is_stalled: bool = False  # by its last heartbeat
    is_leaving: bool = False
    max_context_tokens: int = field(init=False)  # longest prompt and output that it can hold

    def __post_init__(self) -> None:
        self.max_context_tokens = self.info.max_context_tokens

    @property
    def address(self) -> PeerAddress:
        info = self.info
        return PeerAddress(info.name, self.incarnation, info.host_id, info.transfer_endpoint)


class NodeRegistry:
    """All nodes that are members."""

    def __init__(self, silence: float, stall: float, served: ServedModel | None = None) -> None:
        """`silence` and `stall` in seconds; `served` is the model that the coordinator serves."""
        self.nodes: dict[Incarnation, NodeMember] = {}
        self.drains = DrainSet()  # by operators
        self.switching_drains = DrainSet()  # nodes that are switching roles
        self.silence_seconds = silence
        self._stall_seconds = stall
        self.model_identity: ModelIdentity | None = (
            None  # the cluster's; None before the first join
        )
        self.model_digest = b""  # what requests are bound to
        self._served_model = served or ServedModel()
        self._earliest_silence = math.inf  # nobody counts as silent before

    def check_join(self, info: JoinInfo, now: float, bound_requests: int = 0) -> NodeMember | None:
        """Check whether the node may join; return the incarnation of its process that it would
        replace.

        `bound_requests` bind the cluster to its present model. Raises ConfigError; one with
        `retry_after` may go away with time.
        """
        require_valid_join(info)
        require_served_model(info, self._served_model)
        others = any(node.info.name != info.name for node in self.nodes.values())
        if self.model_identity is not None and (others or bound_requests):
            require_cluster_model(info, self.model_identity, 0 if others else bound_requests)
        holder = self.by_name(info.name)
        if holder is not None:
            require_free_name(
                info, holder.info, free_in=holder.heard_at + self.silence_seconds - now
            )
        return holder

    def add_node(self, info: JoinInfo, incarnation: Incarnation, now: float) -> NodeMember:
        """Add a node that `check_join` has accepted, after what it replaces was removed."""
        self.model_identity = info.model
        self.model_digest = self.model_identity.digest
        node = NodeMember(
            info, incarnation, joined_at=now, heard_at=now, model_digest=self.model_digest
        )
        self.nodes[incarnation] = node
        self._earliest_silence = min(self._earliest_silence, now + self.silence_seconds)
        return node

    def remove_node(self, incarnation: Incarnation) -> NodeMember | None:
        return self.nodes.pop(incarnation, None)

    def record_heartbeat(self, node: NodeMember, stats: NodeStats) -> bool:
        """Store the node's latest statistics.

        Returns whether its cache has become smaller than the node has announced.
        """
        node.stats = stats
        node.is_stalled = stats.progress_age_seconds > self._stall_seconds
        has_shrunk = 0 < stats.blocks_total < node.info.num_blocks
        if has_shrunk:
            node.info = replace(node.info, num_blocks=stats.blocks_total)
        return has_shrunk

    def has_serving_node(self, role: Role) -> bool:
        """Return whether a node of the role is in service."""
        return next(self.nodes_in_service(role), None) is not None

    def nodes_in_service(self, role: Role | None = None) -> Iterator[NodeMember]:
        """Iterate over the nodes, of one role or all, that may be given new work: not leaving,
        drained, switching roles or stalled."""
        for node in self.nodes.values():
            if (role is None or node.info.role is role) and self._may_serve(node):
                yield node

    def name_of(self, node: Incarnation | None) -> NodeName:
        """Return the name of a member, "" for none."""
        member = self.nodes.get(node) if node else None
        return member.info.name if member else NodeName("")

    def by_name(self, name: NodeName) -> NodeMember | None:
        return next((node for node in self.nodes.values() if node.info.name == name), None)

    def why_unavailable(self, role: Role) -> str:
        """Return why no node of the role can be given work, "" if one can."""
        if self.has_serving_node(role):
            return ""
        of_role = (node for node in self.nodes.values() if node.info.role is role)
        drained = sorted(node.info.name for node in of_role if self._is_drained(node))
        return f"there is no {role.value} node" + (
            f" but drained ones ({', '.join(drained)})" if drained else ""
        )

    def find_expired(
        self, now: float, count_attempts: Callable[[Incarnation], int]
    ) -> list[tuple[NodeMember, NodeFailed]]:
        """Return the nodes to remove: silent ones, and those that have attempts and make no
        progress."""
        found: list[tuple[NodeMember, NodeFailed]] = []
        self._earliest_silence = math.inf
        for node in self.nodes.values():
            name, quiet = node.info.name, now - node.heard_at
            if quiet >= self.silence_seconds:
                found.append(
                    (
                        node,
                        NodeLost(
                            f"node {name} was silent for {quiet:.1f} s (--silence"
                            f" {self.silence_seconds:g})"
                        ),
                    )
                )
                continue
            self._earliest_silence = min(
                self._earliest_silence, node.heard_at + self.silence_seconds
            )
            if node.is_stalled and count_attempts(node.incarnation):
                age = node.stats.progress_age_seconds if node.stats else 0.0
                found.append(
                    (
                        node,
                        NodeStalled(
                            f"node {name} made no progress for {age:.1f} s (--stall"
                            f" {self._stall_seconds:g})"
                        ),
                    )
                )
        return found

    def next_silence_at(self) -> float | None:
        """Return when to look for silent nodes again. It may be too early: messages that arrive
        meanwhile are considered at the next look."""
        return self._earliest_silence if self._earliest_silence < math.inf else None

    def _is_drained(self, node: NodeMember) -> bool:
        return node.info.name in self.drains

    def _may_serve(self, node: NodeMember) -> bool:
        name = node.info.name
        if name in self.drains.names or name in self.switching_drains.names:
            return False
        if node.stats is None:
            # A fresh process is idle. One that rejoins may have been given up because it stands
            # still: it must speak.
            return not node.is_leaving and not node.info.rejoining
        return not node.is_leaving and not node.is_stalled

    def get_layout(self) -> KVLayout:
        """Return the cluster's KV layout. Valid only after the first join."""
        assert self.model_identity is not None, "no node has joined"
        return self.model_identity.layout


# long enough for a restarted node to load its model
DEPARTED_NODE_MEMORY_SECONDS = 600.0


class RequestLength(Protocol):
    """How many tokens a request has, and may have."""

    @property
    def context_tokens(self) -> int:
        """Prompt tokens, and output tokens so far."""
        ...

    @property
    def remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """Prompt tokens, and the longest output that was asked for."""
        ...


class ContextCapacity:
    """How many tokens a request may have. With `hands_off`, prefill nodes compute prompts."""

    def __init__(self, registry: NodeRegistry, *, hands_off: bool) -> None:
        self._registry = registry
        self._hands_off = hands_off
        # nodes that have left, and until when each is remembered
        self._departed_nodes: dict[NodeName, tuple[JoinInfo, float]] = {}
        self._bounds: ModelBounds | None = None

    def on_node_joined(self, info: JoinInfo) -> None:
        """Must be called after the node was added to the registry."""
        self._departed_nodes = {
            name: one
            for name, one in self._departed_nodes.items()
            if name != info.name and one[0].model == self._registry.model_identity
        }
        self._compute_bounds()

    def on_cache_shrunk(self) -> None:
        """Must be called after a node in the registry has lost blocks."""
        self._compute_bounds()

    def on_node_left(self, info: JoinInfo, now: float) -> None:
        """Must be called after the node was removed from the registry."""
        self._departed_nodes[info.name] = (info, now + DEPARTED_NODE_MEMORY_SECONDS)
        self._compute_bounds()

    def expire_departed_nodes(self, now: float) -> None:
        """Forget nodes that left long ago, unless no node is left."""
        gone = [name for name, (_, until) in self._departed_nodes.items() if until <= now]
        if gone and self._registry.nodes:
            for name in gone:
                del self._departed_nodes[name]
            self._compute_bounds()

    def get_model_bounds(self) -> ModelBounds | None:
        """Return the bounds of requests; None before the first join."""
        return self._bounds

    def can_fit_context(self, role: Role, tokens: int) -> bool:
        """Return whether a node in service of the role can hold so many tokens of one request."""
        return any(
            node.max_context_tokens >= tokens for node in self._registry.nodes_in_service(role)
        )

    def why_too_long(self, request: RequestLength) -> str:
        """Return why no node in service can hold the request; "" if one can, or without decode
        nodes."""
        alone = self._hands_off and request.remaining_tokens <= 1
        if alone and self.can_fit_context(Role.PREFILL, request.context_tokens + 1):
            return ""
        contexts = (
            node.max_context_tokens for node in self._registry.nodes_in_service(Role.DECODE)
        )
        largest = max(contexts, default=request.max_total_tokens)
        if largest >= request.max_total_tokens:
            return ""
        return (
            f"no decode node that is here can hold its {request.max_total_tokens} tokens, the"
            f" largest holds {largest} (--max-model-len, --kv-memory)"
        )

    def _compute_bounds(self) -> None:
        here = [node.info for node in self._registry.nodes.values()]
        largest = _largest_node([*here, *(info for info, _ in self._departed_nodes.values())])
        self._bounds = ModelBounds(
            vocab_size=largest.vocab_size,
            max_model_len=largest.max_model_len,
            cache_tokens=largest.num_blocks * largest.layout.block_size,
            model_digest=largest.model_digest,
            dtype=largest.dtype,
            quantization=largest.quantization,
            current_max_context=_largest_node(here).max_context_tokens if here else 0,
        )


def _largest_node(infos: Collection[JoinInfo]) -> JoinInfo:
    """Return the node whose cache and model hold the longest context.

    A decode node, because a request ends there; any node if there is no decode node.
    """
    decode = [info for info in infos if info.role is Role.DECODE]
    return max(decode or infos, key=lambda info: info.max_context_tokens)
