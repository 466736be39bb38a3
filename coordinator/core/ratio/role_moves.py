"""Which nodes are to take another role, so that the cluster comes to the ratio that it was told to
have.

A node on its way to a role counts as one of that role, so what is decided again and again comes to
an end. A change begins only where one role has too many and the other too few: a node that is
missing at the moment, or one too many, makes nobody move to and fro.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.types import NodeName, Role


@dataclass(frozen=True, slots=True)
class NodeRoleState:
    """A live node. `role`: that it has, or is on its way to. `is_serving`: it is given new work.
    `is_switching`: it is between two roles, and `is_draining` it still has the other one.
    `is_locked`: nothing can be decided for it now. `attempts`: attempts placed there."""

    name: NodeName
    role: Role
    is_serving: bool = True
    is_switching: bool = False
    is_draining: bool = False
    is_locked: bool = False
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class RoleMove:
    name: NodeName
    target_role: Role


def opposite_role(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def plan_role_moves(
    target: RoleSplit, nodes: Iterable[NodeRoleState], bare: Sequence[Role] = ()
) -> list[RoleMove]:
    """What to do now. The last node in service of a role that the target has stays; one that is
    leaving such a role is called back if nobody else serves. First those that are between two
    roles, then the least loaded in service, then those out of service. `bare`: roles that nobody
    has had for too long; one that can be spared takes such a role."""
    standings = list(nodes)
    for role in Role:
        if target.node_count(role) and not _count_serving(standings, role):
            back = [
                node for node in standings if node.is_draining and node.role is opposite_role(role)
            ]
            if back:
                return [RoleMove(min(back, key=_move_cost).name, role)]
    for role in bare:
        able = [
            node for node in standings if node.role is opposite_role(role) and not node.is_locked
        ]
        for node in sorted(able, key=_move_cost):
            if _count_serving(standings, opposite_role(role)) > node.is_serving:
                return [RoleMove(node.name, role)]
    have = Counter(node.role for node in standings)
    for role in Role:
        count = min(
            have[role] - target.node_count(role),
            target.node_count(opposite_role(role)) - have[opposite_role(role)],
        )
        if count > 0:
            return _pick_leavers(target, role, count, standings)
    return []


def _pick_leavers(
    target: RoleSplit, role: Role, count: int, standings: Sequence[NodeRoleState]
) -> list[RoleMove]:
    """Those that cannot be turned round yet will be as soon as they can: nobody else goes in their
    place."""
    count -= sum(node.is_locked and node.is_switching for node in standings if node.role is role)
    spare = _count_serving(standings, role) - bool(target.node_count(role))
    found: list[RoleMove] = []
    able = [node for node in standings if node.role is role and not node.is_locked]
    for node in sorted(able, key=_move_cost):
        if len(found) >= count:
            break
        if node.is_serving:
            spare -= 1
            if spare < 0:
                continue
        found.append(RoleMove(node.name, opposite_role(role)))
    return found


def _count_serving(standings: Sequence[NodeRoleState], role: Role) -> int:
    return sum(node.is_serving for node in standings if node.role is role)


def _move_cost(node: NodeRoleState) -> tuple[int, int, NodeName]:
    return (0 if node.is_switching else 1 if node.is_serving else 2, node.attempts, node.name)
