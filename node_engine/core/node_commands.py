"""Commands to the compute thread, beside events of the transfer plane: a closed union.

Orders come from the coordinator (`baton/cluster_link/messages.py`); the rest is local to the node.
"""

from dataclasses import dataclass

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    NodeOrder,
    PrefillOrder,
    TicketOrder,
)
from baton.kv.pool_types import PoolHit
from baton.types import AttemptKey, Incarnation


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """The node has joined with a new incarnation: drop the work of the previous one."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator was away for too long: drop its work, keep the prefix cache."""


@dataclass(frozen=True, slots=True)
class OrderWithPoolHit:
    """An order, and what this host's pool has of its context."""

    order: DecodeOrder | PrefillOrder
    pool_hit: PoolHit  # pinned; the handler of the command owns the pin


NodeCommand = NodeOrder | NodeJoined | CoordinatorLost | OrderWithPoolHit


def get_attempt_key(command: NodeCommand) -> AttemptKey | None:
    """The attempt that an order is about; None for other commands."""
    match command:
        case DecodeOrder(work) | PrefillOrder(work):
            return work.key
        case TicketOrder(ticket):
            return ticket.key
        case CancelOrder(key):
            return key
        case _:
            return None
