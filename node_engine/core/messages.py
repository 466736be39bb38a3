"""What the coordinator can ask of a node, as the compute thread sees it: a closed union beside the transfer plane's own
events. `node_engine/host/commands.py` is the only translator from the wire."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.pool_terms import Elsewhere, PoolHit
from baton.types import AttemptKey, Incarnation, PeerAddress, Role, Ticket, Work


@dataclass(frozen=True, slots=True)
class Joined:
    """A (new) incarnation: what was held for the one before is dropped."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """No coordinator for too long: what is held for it is dropped, the cache is kept."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve this attempt. `writer` brings the KV of the context; without one, compute it here. From now on prompts that
    are computed here may add `prefill_share` of its length to a step of those that run; 0: there is no such bound.
    `elsewhere`: another host's pool that has more of the context than there is on this host. `hit`: what this host's
    pool has of it, pinned; whoever handles the message owns the pin."""

    work: Work
    writer: PeerAddress | None
    prefill_share: float = 0.0
    hit: PoolHit | None = None
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this attempt's context and hand it over; with `alone` the answer is one token and nobody follows. `hit`
    and `elsewhere`: as in Submit."""

    work: Work
    alone: bool
    hit: PoolHit | None = None
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class GiveTicket:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Cancel:
    key: AttemptKey
    reason: BatonError


@dataclass(frozen=True, slots=True)
class PeerGone:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LedgerQuery:
    query: int


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Tell everything that the prefix index has."""


@dataclass(frozen=True, slots=True)
class SetRole:
    """Take this role as soon as nothing is held here any more, and join anew in it. Nothing is given to this
    incarnation after it; a new one makes it void."""

    role: Role


Command = (
    Joined | CoordinatorLost | Submit | Prefill | GiveTicket | Cancel | PeerGone | LedgerQuery | CacheQuery | SetRole
)
