"""What nodes tell the brain, what it tells them, and what it asks its shell to do: plain data, no
wire format.

`coordinator/node_links/message_codec.py` turns these into protobuf and back.
"""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.kv.pool_types import RemotePrefix
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport, Timeline
from baton.role_split import RoleSplit
from baton.types import (
    AttemptKey,
    AttemptSpec,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    RequestId,
    Role,
    Ticket,
    TokenEvent,
    TokenLogprobs,
)
from coordinator.core.common.breaker_state import BreakerState

# what nodes say


@dataclass(frozen=True, slots=True)
class BlocksReserved:
    """Decode has set blocks aside. Without a ticket it needs no writer and computes the last token
    itself."""

    key: AttemptKey
    ticket: Ticket | None
    held_tokens: int


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """No room now, nothing is held. In blocks."""

    key: AttemptKey
    needed_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What one step produced, of all sequences; a sequence's tokens stand together and in order."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobsReport:
    """Of the prompt's tokens `first_index` .. `first + len(scores)`, from the node that computes
    the prompt, in order."""

    key: AttemptKey
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """`preempting_class`: of a preemption, the class that took the blocks."""

    key: AttemptKey
    error: BatonError
    preempting_class: str = ""


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prompt is computed on the prefill node; the hand-off is about to be sealed. In tokens,
    and in seconds of its steps: the prompt's share of them. Of `cached_tokens` the shared pool had
    `pool_tokens`, and `remote_pool_tokens` of these it has fetched from another host's pool for
    this attempt."""

    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    compute_seconds: float = 0.0
    pool_tokens: int = 0
    remote_pool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandoffCompleted:
    """Decode has committed, says the prefill node."""

    key: AttemptKey
    report: HandoffReport


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The attempt runs on decode; where its context came from there, in tokens; seconds as in
    PrefillEnded."""

    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    received_tokens: int
    compute_seconds: float = 0.0
    pool_tokens: int = 0
    remote_pool_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    stats: NodeStats


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What the node's prefix index has gained and lost: short names of BlockHashes."""

    sequence: int
    inserted: tuple[int, ...]
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """What it has; all that was told before is void."""

    sequence: int
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    reason: str


NodeReport = (
    BlocksReserved
    | ReservationRefused
    | PromptLogprobsReport
    | StepTokens
    | AttemptFailed
    | PrefillEnded
    | HandoffCompleted
    | DecodeStarted
    | Heartbeat
    | CacheEvents
    | CacheSnapshot
    | NodeLeaving
)

# what nodes are told


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """Without a writer the node computes the prompt itself. From now on prompts that are computed
    there may make a step of running sequences longer by `prefill_step_share` of it; 0: there is no
    such bound. `remote_prefix`: another host's pool that has more of the context than there is on
    the node's."""

    work: AttemptSpec
    kv_writer: PeerAddress | None
    prefill_step_share: float = 0.0
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """`remote_prefix`: as in Submit."""

    work: AttemptSpec
    needs_no_decode: bool
    remote_prefix: RemotePrefix | None = None


@dataclass(frozen=True, slots=True)
class TicketOrder:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CancelOrder:
    key: AttemptKey
    reason: BatonError


@dataclass(frozen=True, slots=True)
class PeerLostNotice:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class CacheSnapshotRequest:
    """Send a CacheSnapshot."""


@dataclass(frozen=True, slots=True)
class SetRoleOrder:
    """Take this role and join anew in it. The last thing that an incarnation is told."""

    role: Role


NodeOrder = (
    DecodeOrder
    | PrefillOrder
    | TicketOrder
    | CancelOrder
    | PeerLostNotice
    | CacheSnapshotRequest
    | SetRoleOrder
)

# what the shell is to do, in this order


@dataclass(frozen=True, slots=True)
class SendOrder:
    incarnation: Incarnation
    order: NodeOrder


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """The request is accepted for good: from here on only its own end ends it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """`logprobs`: one for each token if the request asks for them, else none."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EmitPromptLogprobs:
    """All of them, once, before the first Emit."""

    request_id: RequestId
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FinishedResult:
    """The good end. `cached_tokens`: prompt tokens that the first placement did not have to
    compute."""

    reason: FinishReason
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The one terminal event. `output_tokens` is the number of tokens the client was sent;
    `ttft_seconds` is None without any; `is_internal` marks a request that no client made;
    `tenant_class` labels it."""

    request_id: RequestId
    result: FinishedResult | BatonError
    output_tokens: int
    timeline: Timeline
    ttft_seconds: float | None
    is_internal: bool
    tenant_class: str = "default"


@dataclass(frozen=True, slots=True)
class AttemptReplaced:
    """An attempt is given up and its request will be placed again: for the log, nothing is to be
    done."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The incarnation is a member no more: its stream is to end. `is_expected`: it was told to join
    anew."""

    incarnation: Incarnation
    name: NodeName
    error: BatonError
    is_expected: bool = False


@dataclass(frozen=True, slots=True)
class BreakerChanged:
    """The circuit breaker between two nodes, likewise for the log."""

    prefill_node: NodeName
    decode_node: NodeName
    state: BreakerState


@dataclass(frozen=True, slots=True)
class RoleSwitchReport:
    """A change of role is over, for the log and the metrics. `outcome`: done, recalled (while
    draining), superseded (before it counted), or lost (the node came back as what it was, or not at
    all). Seconds of each phase; 0 of those that were not reached."""

    node: NodeName
    source_role: Role
    target_role: Role
    outcome: str
    drain_seconds: float
    switch_seconds: float
    probe_seconds: float
    detail: str
    generation: int


@dataclass(frozen=True, slots=True)
class RatioChanged:
    """The ratio was changed so that an objective is kept: for the log."""

    target_split: RoleSplit
    reason: str


@dataclass(frozen=True, slots=True)
class DegradationChanged:
    """A step of degradation was taken, or taken back: for the log, nothing is to be done."""

    step: str
    is_taken: bool
    pressure: float


Effect = (
    DegradationChanged
    | SendOrder
    | AdmitRequest
    | EmitPromptLogprobs
    | EmitTokens
    | EndRequest
    | AttemptReplaced
    | MemberLost
    | BreakerChanged
    | RoleSwitchReport
    | RatioChanged
)
