"""Decides which nodes switch roles so that the cluster reaches the target split.

A node that is switching counts in its new role, so repeated decisions converge. A switch starts
only if one role has too many nodes and the other too few: a node that is missing for a moment, or
one too many, causes no switch.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.types import NodeName, Role


@dataclass(frozen=True, slots=True)
class NodeRoleState:
    """A live node and what it may do next, as input to `plan_role_moves`."""

    name: NodeName
    role: Role  # the role that the node has or is switching to
    is_serving: bool = True  # whether it is given new work
    is_switching: bool = False  # whether it is between two roles
    is_draining: bool = False  # whether it is switching and still has the other role
    is_locked: bool = False  # whether it cannot start another switch now
    attempts: int = 0  # attempts placed there


@dataclass(frozen=True, slots=True)
class RoleMove:
    """One node that must switch."""

    name: NodeName
    target_role: Role


def opposite_role(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def plan_role_moves(
    target: RoleSplit, nodes: Iterable[NodeRoleState], unstaffed: Sequence[Role] = ()
) -> list[RoleMove]:
    """Return the switches to start now.

    The last node in service of a role that the target has stays; a node that is draining from such
    a role is recalled if no other serves. Nodes between two roles go first, then the least loaded
    ones in service, then those out of service. `unstaffed` are roles that have had no node for too
    long; a node that can be spared takes such a role.
    """
    states = list(nodes)
    for role in Role:
        if target.node_count(role) and not _count_serving(states, role):
            draining = [
                node for node in states if node.is_draining and node.role is opposite_role(role)
            ]
            if draining:
                return [RoleMove(min(draining, key=_move_cost).name, role)]
    for role in unstaffed:
        movable = [
            node for node in states if node.role is opposite_role(role) and not node.is_locked
        ]
        for node in sorted(movable, key=_move_cost):
            if _count_serving(states, opposite_role(role)) > node.is_serving:
                return [RoleMove(node.name, role)]
    node_counts = Counter(node.role for node in states)
    for role in Role:
        count = min(
            node_counts[role] - target.node_count(role),
            target.node_count(opposite_role(role)) - node_counts[opposite_role(role)],
        )
        if count > 0:
            return _pick_leavers(target, role, count, states)
    return []


def _pick_leavers(
    target: RoleSplit, role: Role, count: int, states: Sequence[NodeRoleState]
) -> list[RoleMove]:
    """Pick nodes of a role to switch. Locked nodes that are switching will be turned back as soon
    as possible, so no other node goes in their place."""
    count -= sum(node.is_locked and node.is_switching for node in states if node.role is role)
    spare = _count_serving(states, role) - bool(target.node_count(role))
    moves: list[RoleMove] = []
    movable = [node for node in states if node.role is role and not node.is_locked]
    for node in sorted(movable, key=_move_cost):
        if len(moves) >= count:
            break
        if node.is_serving:
            spare -= 1
            if spare < 0:
                continue
        moves.append(RoleMove(node.name, opposite_role(role)))
    return moves


def _count_serving(states: Sequence[NodeRoleState], role: Role) -> int:
    return sum(node.is_serving for node in states if node.role is role)


def _move_cost(node: NodeRoleState) -> tuple[int, int, NodeName]:
    return (0 if node.is_switching else 1 if node.is_serving else 2, node.attempts, node.name)
