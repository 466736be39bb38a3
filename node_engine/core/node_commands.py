"""Commands of the coordinator to a node, as the compute thread sees them: a closed union.

`node_engine/host/command_codec.py` is the only translator from the wire format. Events of the
transfer plane are not part of the union.
"""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.kv.pool_types import PoolHit, RemotePrefix
from baton.types import AttemptKey, AttemptSpec, Incarnation, PeerAddress, Role, Ticket


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """The node has joined with a new incarnation: drop the work of the previous one."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator was away for too long: drop its work, keep the prefix cache."""


@dataclass(frozen=True, slots=True)
class DecodeCommand:
    """Decode this attempt, after its KV was received or computed here."""

    work: AttemptSpec
    kv_writer: PeerAddress | None  # the prefill node that sends the KV; None: compute it here
    # From now on: local prompts may add this share of its length to a decode step; 0: unbounded.
    prefill_step_share: float = 0.0
    # What this host's pool has of the context, pinned; the handler of the command owns the pin.
    pool_hit: PoolHit | None = None
    remote_prefix: RemotePrefix | None = None  # a pool of another host that has more of it


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """Compute this attempt's context and hand its KV to a decode node."""

    work: AttemptSpec
    needs_no_decode: bool  # the output is one token: no hand-off
    pool_hit: PoolHit | None = None  # as in DecodeCommand
    remote_prefix: RemotePrefix | None = None  # as in DecodeCommand


@dataclass(frozen=True, slots=True)
class TicketCommand:
    """A decode node has granted `ticket`: its blocks may be written."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """End this attempt."""

    key: AttemptKey
    reason: BatonError


@dataclass(frozen=True, slots=True)
class PeerLostCommand:
    """This member has left the cluster: its hand-offs fail."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LedgerCommand:
    """Report the block ledger."""

    query_id: int


@dataclass(frozen=True, slots=True)
class CacheSnapshotCommand:
    """Report the whole prefix index."""


@dataclass(frozen=True, slots=True)
class SetRoleCommand:
    """Switch to this role as soon as no attempt is held here, then rejoin the cluster.

    This incarnation gets no work after the command; a new incarnation cancels it.
    """

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
