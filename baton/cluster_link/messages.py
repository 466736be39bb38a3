"""What nodes and pools report, and what they are ordered: plain data, stated once for both ends.

`order_codec.py`, `report_codec.py` and `join_codec.py` convert them to protobuf and back.
"""

from dataclasses import dataclass

from baton.cluster_link.report_types import HandoffReport, MemberLedger, NodeStats, VerifiedDraft
from baton.errors import BatonError
from baton.kv.blocks import KVLayout
from baton.kv.cache_journal import CacheEventBatch
from baton.kv.pool_types import RemotePrefix
from baton.models.file_digests import UNKNOWN_DIGESTS, ModelFileDigests
from baton.models.model_identity import UNQUANTIZED, ModelIdentity
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    NodeName,
    PeerAddress,
    Role,
    Ticket,
    TokenEvent,
    TokenLogprobs,
)

PROTOCOL_VERSION = 3
POOL_ROLE = "pool"  # the role that a pool joins with; nodes join with a `Role`

# what joins


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """One node's announcement."""

    protocol_version: int
    name: NodeName
    role: Role
    host_id: str
    transfer_endpoint: str
    pid: int
    model_digest: str  # hex
    layout: KVLayout
    num_blocks: int  # KV blocks
    max_num_seqs: int  # sequences at once
    max_batched_tokens: int  # tokens of one step
    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    engine: str
    rejoining: str = ""  # the incarnation that the process had before, if any
    # random for each process: equal after a rejoin, different for another process
    process: str = ""
    implementation: str = ""
    dtype: str = ""
    quantization: str = UNQUANTIZED
    files: ModelFileDigests = UNKNOWN_DIGESTS

    @property
    def model(self) -> ModelIdentity:
        return ModelIdentity(
            implementation=self.implementation,
            model_digest=self.model_digest,
            dtype=self.dtype,
            quantization=self.quantization,
            layout=self.layout,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt and output that the node can hold, in tokens."""
        return min(self.max_model_len, self.num_blocks * self.layout.block_size)


@dataclass(frozen=True, slots=True)
class PoolJoinInfo:
    """One pool's announcement."""

    protocol_version: int
    name: NodeName
    host_id: str
    endpoint: str  # HOST:PORT that nodes of its host and other pools dial
    pid: int
    model_digest: str  # hex
    layout: KVLayout
    num_blocks: int
    process: str = ""  # as in `JoinInfo`
    rejoining: str = ""  # likewise


# what the link itself exchanges


@dataclass(frozen=True, slots=True)
class Welcome:
    """The join is accepted."""

    incarnation: Incarnation  # minted for this join
    heartbeat_seconds: float  # send a Heartbeat so often
    silence_seconds: float  # without a message for so long, either side gives the other up


@dataclass(frozen=True, slots=True)
class JoinRefusal:
    """The join is refused, and the stream ends."""

    error: BatonError
    # it may be accepted after so long; 0: only another configuration helps
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Sent to a node that gets no other message."""


@dataclass(frozen=True, slots=True)
class ArmFailpoints:
    """Inject faults, for tests; see `baton/process/failpoints.py`."""

    spec: str


LinkControl = Welcome | JoinRefusal | Ping | ArmFailpoints

# what nodes say


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """A decode node has reserved blocks. Without a ticket it needs no KV writer and computes the
    last token itself."""

    key: AttemptKey
    ticket: Ticket | None
    held_tokens: int  # context tokens that the node's cache holds


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """A decode node has no room at present and has reserved nothing."""

    key: AttemptKey
    needed_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one engine step, of all sequences; each sequence's tokens are adjacent and in
    order."""

    events: tuple[TokenEvent, ...]
    drafts: tuple[VerifiedDraft, ...] = ()  # of sequences with speculative decoding


@dataclass(frozen=True, slots=True)
class PromptLogprobsReport:
    """Logprobs of consecutive prompt tokens, from the node that computes the prompt, in order."""

    key: AttemptKey
    first_index: int  # index in the prompt of the first of them
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A node has given up its leg of the attempt."""

    key: AttemptKey
    error: BatonError
    preempting_class: str = ""  # after a preemption, the class that took the blocks


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prefill node has computed the prompt and is about to seal the hand-off."""

    key: AttemptKey
    computed_tokens: int  # prompt tokens that the node computed
    cached_tokens: int  # prompt tokens that it found cached, the shared pool's included
    compute_seconds: float = 0.0  # the prompt's share of the node's steps
    pool_tokens: int = 0  # of `cached_tokens`, those from the shared pool
    remote_pool_tokens: int = 0  # of `pool_tokens`, those fetched from another host's pool
    step_seconds: float = 0.0  # duration of the steps that computed the prompt


@dataclass(frozen=True, slots=True)
class HandoffCompleted:
    """The prefill node has learned that decode committed the hand-off."""

    key: AttemptKey
    report: HandoffReport


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The decode node runs the attempt, and reports where its context came from."""

    key: AttemptKey
    computed_tokens: int  # context tokens that the node computed
    cached_tokens: int  # context tokens that it found cached, the shared pool's included
    received_tokens: int  # context tokens that the hand-off brought
    compute_seconds: float = 0.0  # the prompt's share of the node's steps
    pool_tokens: int = 0  # of `cached_tokens`, those from the shared pool
    remote_pool_tokens: int = 0  # of `pool_tokens`, those fetched from another host's pool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    stats: NodeStats


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Insertions and evictions of a node's prefix index, as short block hashes."""

    sequence: int  # increases by one with every message of the node
    inserted: tuple[int, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All block hashes of a node's prefix index; it replaces what was reported before."""

    sequence: int
    block_hashes: tuple[int, ...]


def build_cache_report(batch: CacheEventBatch) -> CacheEvents | CacheSnapshot:
    if batch.is_reset:
        return CacheSnapshot(batch.sequence_number, batch.inserted_hashes)
    return CacheEvents(batch.sequence_number, batch.inserted_hashes, batch.evicted_hashes)


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The node stops: it takes no new work."""

    reason: str


AttemptReport = (
    BlocksReserved
    | ReservationRefused
    | PromptLogprobsReport
    | AttemptFailed
    | PrefillEnded
    | HandoffCompleted
    | DecodeStarted
)
NodeReport = AttemptReport | StepTokens | Heartbeat | CacheEvents | CacheSnapshot | NodeLeaving


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The answer to a `LedgerQuery`; it is for the operator who asked, not for the brain."""

    query_id: int
    ledger: MemberLedger
    disk: MemberLedger | None = None  # of a pool that has one


# what nodes are told


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Run an attempt on a decode node; without a KV writer the node computes the prompt itself."""

    work: AttemptSpec
    kv_writer: PeerAddress | None  # the prefill node that will write the KV cache
    # from now on, the most that prompts computed there may lengthen a decode step, as a share of
    # it; 0: no bound
    prefill_step_share: float = 0.0
    # another host's pool that has more of the context than the node's own
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """Compute a prompt on a prefill node."""

    work: AttemptSpec
    needs_no_decode: bool  # the node answers alone: the output is one token
    remote_prefix: RemotePrefix | None = None  # as in `DecodeOrder`


@dataclass(frozen=True, slots=True)
class TicketOrder:
    """Give a prefill node the ticket to write into a decode node's blocks."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Stop working on an attempt."""

    key: AttemptKey
    reason: BatonError


@dataclass(frozen=True, slots=True)
class PeerLostNotice:
    """Another node has left the cluster."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LedgerQuery:
    """Report the block ledger."""

    query_id: int


@dataclass(frozen=True, slots=True)
class CacheSnapshotRequest:
    """Send a CacheSnapshot."""


@dataclass(frozen=True, slots=True)
class SetRoleOrder:
    """Take another role and rejoin in it. It is the last order that an incarnation receives."""

    role: Role


NodeOrder = (
    DecodeOrder
    | PrefillOrder
    | TicketOrder
    | CancelOrder
    | PeerLostNotice
    | LedgerQuery
    | CacheSnapshotRequest
    | SetRoleOrder
)
