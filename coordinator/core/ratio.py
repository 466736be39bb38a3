"""Which nodes are to take another role, so that the cluster comes to the ratio that it was told to have.

A node on its way to a role counts as one of that role, so what is decided again and again comes to an end. A change
begins only where one role has too many and the other too few: a node that is missing at the moment, or one too many,
makes nobody move to and fro.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.types import NodeName, Role


@dataclass(frozen=True, slots=True)
class Standing:
    """A live node. `role`: that it has, or is on its way to. `serves`: it is given new work. `moving`: it is between
    two roles, and `leaving` it still has the other one. `fixed`: nothing can be decided for it now. `load`: attempts
    placed there."""

    name: NodeName
    role: Role
    serves: bool = True
    moving: bool = False
    leaving: bool = False
    fixed: bool = False
    load: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    name: NodeName
    to: Role


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def moves(target: Split, nodes: Iterable[Standing], bare: Sequence[Role] = ()) -> list[Move]:
    """What to do now. The last node in service of a role that the target has stays; one that is leaving such a role is
    called back if nobody else serves. First those that are between two roles, then the least loaded in service, then
    those out of service. `bare`: roles that nobody has had for too long; one that can be spared takes such a role."""
    standings = list(nodes)
    for role in Role:
        if target.of(role) and not _serving(standings, role):
            back = [node for node in standings if node.leaving and node.role is other(role)]
            if back:
                return [Move(min(back, key=_reluctance).name, role)]
    for role in bare:
        able = [node for node in standings if node.role is other(role) and not node.fixed]
        for node in sorted(able, key=_reluctance):
            if _serving(standings, other(role)) > node.serves:
                return [Move(node.name, role)]
    have = Counter(node.role for node in standings)
    for role in Role:
        count = min(have[role] - target.of(role), target.of(other(role)) - have[other(role)])
        if count > 0:
            return _leave(target, role, count, standings)
    return []


def _leave(target: Split, role: Role, count: int, standings: Sequence[Standing]) -> list[Move]:
    """Those that cannot be turned round yet will be as soon as they can: nobody else goes in their place."""
    count -= sum(node.fixed and node.moving for node in standings if node.role is role)
    spare = _serving(standings, role) - bool(target.of(role))
    found: list[Move] = []
    able = [node for node in standings if node.role is role and not node.fixed]
    for node in sorted(able, key=_reluctance):
        if len(found) >= count:
            break
        if node.serves:
            spare -= 1
            if spare < 0:
                continue
        found.append(Move(node.name, other(role)))
    return found


def _serving(standings: Sequence[Standing], role: Role) -> int:
    return sum(node.serves for node in standings if node.role is role)


def _reluctance(node: Standing) -> tuple[int, int, NodeName]:
    return (0 if node.moving else 1 if node.serves else 2, node.load, node.name)
