"""What the coordinator can ask of a node, as the compute thread sees it: a closed union beside the
transfer plane's own events. `node_engine/host/command_codec.py` is the only translator from the
wire."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.kv.pool_types import PoolHit, RemotePrefix
from baton.types import AttemptKey, AttemptSpec, Incarnation, PeerAddress, Role, Ticket


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A (new) incarnation: what was held for the one before is dropped."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """No coordinator for too long: what is held for it is dropped, the cache is kept."""


@dataclass(frozen=True, slots=True)
class DecodeCommand:
    """Serve this attempt. `kv_writer` brings the KV of the context; without one, compute it here.
    From now on prompts that are computed here may add `prefill_step_share` of its length to a step
    of those that run; 0: there is no such bound. `remote_prefix`: another host's pool that has more
    of the context than there is on this host. `pool_hit`: what this host's pool has of it, pinned;
    whoever handles the message owns the pin."""

    work: AttemptSpec
    kv_writer: PeerAddress | None
    prefill_step_share: float = 0.0
    pool_hit: PoolHit | None = None
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """Compute this attempt's context and hand it over; with `needs_no_decode` the answer is one
    token and nobody follows. `pool_hit` and `remote_prefix`: as in Submit."""

    work: AttemptSpec
    needs_no_decode: bool
    pool_hit: PoolHit | None = None
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class TicketCommand:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelCommand:
    key: AttemptKey
    reason: BatonError


@dataclass(frozen=True, slots=True)
class PeerLostCommand:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LedgerCommand:
    query_id: int


@dataclass(frozen=True, slots=True)
class CacheSnapshotCommand:
    """Tell everything that the prefix index has."""


@dataclass(frozen=True, slots=True)
class SetRoleCommand:
    """Take this role as soon as nothing is held here any more, and join anew in it. Nothing is
    given to this incarnation after it; a new one makes it void."""

    role: Role


NodeCommand = (
    NodeJoined
    | CoordinatorLost
    | DecodeCommand
    | PrefillCommand
    | TicketCommand
    | CancelCommand
    | PeerLostCommand
    | LedgerCommand
    | CacheSnapshotCommand
    | SetRoleCommand
)
