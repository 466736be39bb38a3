"""The nodes that have joined: who they are, when they were last heard, what they last reported.

The cluster's identity is that of its nodes: fixed by the first of them, and kept as long as a node is a member or a
request that was placed on one lives. A name belongs to one process as long as that is heard.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from baton.errors import NodeFailed, NodeGone, Stalled
from baton.kv_layout import KVLayout
from baton.model_identity import ModelIdentity
from baton.pb.cluster_pb2 import NodeStats
from baton.types import Incarnation, NodeName, PeerAddress, Role
from coordinator.core.drains import Drains
from coordinator.core.identity import (
    CoordinatorModel,
    JoinInfo,
    require_equal,
    require_free_name,
    require_sane,
    require_served,
)


@dataclass(slots=True)
class Node:
    """One incarnation of a node. `stats` is None until its first heartbeat."""

    info: JoinInfo
    incarnation: Incarnation
    joined_at: float
    heard_at: float
    model_digest: bytes  # of the identity that it announced
    stats: NodeStats | None = None
    stands_still: bool = False  # by its last heartbeat
    leaving: bool = False

    @property
    def address(self) -> PeerAddress:
        info = self.info
        return PeerAddress(info.name, self.incarnation, info.host_id, info.transfer_endpoint)


class Registry:
    """`silence` and `stall` in seconds."""

    def __init__(self, silence: float, stall: float, served: CoordinatorModel | None = None) -> None:
        """`served`: what the coordinator knows of the model that it serves."""
        self.nodes: dict[Incarnation, Node] = {}
        self.drains = Drains()  # by operators
        self.switching = Drains()  # on their way to another role: nobody else's business
        self.silence = silence
        self._stall = stall
        self.model: ModelIdentity | None = None  # the cluster's; None before the first join
        self.model_digest = b""  # what requests are bound to
        self._served = served or CoordinatorModel()
        self._silent_at = math.inf  # nobody counts as silent before

    def check(self, info: JoinInfo, now: float, bound_requests: int = 0) -> Node | None:
        """May this node join, while so many requests bind the cluster to its model? Returns the incarnation of the
        same process that it would replace. Raises ConfigError; one with `retry_after` may be cured by waiting."""
        require_sane(info)
        require_served(info, self._served)
        others = any(node.info.name != info.name for node in self.nodes.values())
        if self.model is not None and (others or bound_requests):
            require_equal(info, self.model, 0 if others else bound_requests)
        holder = self.called(info.name)
        if holder is not None:
            require_free_name(info, holder.info, free_in=holder.heard_at + self.silence - now)
        return holder

    def add(self, info: JoinInfo, incarnation: Incarnation, now: float) -> Node:
        """Checked before, and what it replaces removed."""
        self.model = info.model
        self.model_digest = self.model.digest()
        node = Node(info, incarnation, joined_at=now, heard_at=now, model_digest=self.model_digest)
        self.nodes[incarnation] = node
        self._silent_at = min(self._silent_at, now + self.silence)
        return node

    def remove(self, incarnation: Incarnation) -> Node | None:
        return self.nodes.pop(incarnation, None)

    def report(self, node: Node, stats: NodeStats) -> None:
        """A heartbeat."""
        node.stats = stats
        node.stands_still = stats.progress_age_seconds > self._stall

    def serves(self, role: Role) -> bool:
        """Is there a node of the role that may be given new work?"""
        return next(self.in_service(role), None) is not None

    def can_hold(self, role: Role, tokens: int) -> bool:
        """Is there a node of the role that may be given new work and has room for so many tokens of one request?"""
        return any(node.info.context >= tokens for node in self.in_service(role))

    def in_service(self, role: Role | None = None) -> Iterator[Node]:
        """Nodes, of one role or of all, that may be given new work: not leaving, not drained, not changing role, not
        seen to stand still."""
        for node in self.nodes.values():
            if (role is None or node.info.role is role) and self._may_serve(node):
                yield node

    def called(self, name: NodeName) -> Node | None:
        return next((node for node in self.nodes.values() if node.info.name == name), None)

    def models_of(self, *legs: Incarnation | None) -> list[str]:
        """The digest of each of these members, in hex."""
        return [self.nodes[leg].model_digest.hex() for leg in legs if leg is not None]

    def lacks(self, role: Role) -> str:
        """Why no node of the role can be given work, "" if one can."""
        if self.serves(role):
            return ""
        of_role = (node for node in self.nodes.values() if node.info.role is role)
        drained = sorted(node.info.name for node in of_role if self._is_drained(node))
        return f"there is no {role.value} node" + (f" but drained ones ({', '.join(drained)})" if drained else "")

    def expired(self, now: float, busy: Collection[Incarnation]) -> list[tuple[Node, NodeFailed]]:
        """Nodes to give up: silent, or `busy` (attempts are placed there) and without progress."""
        found: list[tuple[Node, NodeFailed]] = []
        self._silent_at = math.inf
        for node in self.nodes.values():
            name, quiet = node.info.name, now - node.heard_at
            if quiet >= self.silence:
                found.append((node, NodeGone(f"node {name} was silent for {quiet:.1f} s (--silence {self.silence:g})")))
                continue
            self._silent_at = min(self._silent_at, node.heard_at + self.silence)
            if node.incarnation in busy and node.stands_still:
                age = node.stats.progress_age_seconds if node.stats else 0.0
                found.append((node, Stalled(f"node {name} made no progress for {age:.1f} s (--stall {self._stall:g})")))
        return found

    def next_silence(self) -> float | None:
        """When to look for silent nodes again: no later than the first may be one. It is asked after every message, so
        what is heard meanwhile is taken into account at the next look."""
        return self._silent_at if self._silent_at < math.inf else None

    def _is_drained(self, node: Node) -> bool:
        return node.info.name in self.drains

    def _may_serve(self, node: Node) -> bool:
        name = node.info.name
        if name in self.drains.names or name in self.switching.names:
            return False
        if node.stats is None:
            # A fresh process is idle. One that rejoins may have been given up because it stands still: it must speak.
            return not node.leaving and not node.info.rejoining
        return not node.leaving and not node.stands_still

    def layout(self) -> KVLayout:
        """The cluster's. Only after the first join."""
        assert self.model is not None, "no node has joined"
        return self.model.layout
