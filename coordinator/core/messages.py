"""What nodes tell the brain, what it tells them, and what it asks its shell to do: plain data, no wire format.

`coordinator/node_messages.py` turns these into protobuf and back.
"""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.pb.cluster_pb2 import NodeStats
from baton.pb.common_pb2 import HandoffReport, Timeline
from baton.pool_terms import Elsewhere
from baton.ratio import Split
from baton.types import (
    AttemptKey,
    FinishReason,
    Incarnation,
    NodeName,
    PeerAddress,
    RequestId,
    Role,
    Ticket,
    TokenEvent,
    TokenScore,
    Work,
)
from coordinator.core.breakers import BreakerState

# what nodes say


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode has set blocks aside. Without a ticket it needs no writer and computes the last token itself."""

    key: AttemptKey
    ticket: Ticket | None
    held_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No room now, nothing is held. In blocks."""

    key: AttemptKey
    needed: int
    free: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one step produced, of all sequences; a sequence's tokens stand together and in order."""

    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of the prompt's tokens `first` .. `first + len(scores)`, from the node that computes the prompt, in order."""

    key: AttemptKey
    first: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """`caused_by`: of a preemption, the class that took the blocks."""

    key: AttemptKey
    error: BatonError
    caused_by: str = ""


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The prompt is computed on the prefill node; the hand-off is about to be sealed. In tokens, and in seconds of its
    steps: the prompt's share of them. Of `cached_tokens` the shared pool had `pooled_tokens`, and `remote_tokens` of
    these it has fetched from another host's pool for this attempt."""

    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    share_seconds: float = 0.0
    pooled_tokens: int = 0
    remote_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Decode has committed, says the prefill node."""

    key: AttemptKey
    report: HandoffReport


@dataclass(frozen=True, slots=True)
class Admitted:
    """The attempt runs on decode; where its context came from there, in tokens; seconds as in PrefillEnded."""

    key: AttemptKey
    computed_tokens: int
    cached_tokens: int
    received_tokens: int
    share_seconds: float = 0.0
    pooled_tokens: int = 0
    remote_tokens: int = 0


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
    names: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    reason: str


NodeInput = (
    Reserved
    | Refused
    | PromptScores
    | Tokens
    | AttemptFailed
    | PrefillEnded
    | HandedOff
    | Admitted
    | Heartbeat
    | CacheEvents
    | CacheSnapshot
    | Leaving
)

# what nodes are told


@dataclass(frozen=True, slots=True)
class Submit:
    """Without a writer the node computes the prompt itself. From now on prompts that are computed there may make a step
    of running sequences longer by `prefill_share` of it; 0: there is no such bound. `elsewhere`: another host's pool
    that has more of the context than there is on the node's."""

    work: Work
    writer: PeerAddress | None
    prefill_share: float = 0.0
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """`elsewhere`: as in Submit."""

    work: Work
    alone: bool
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
class CacheQuery:
    """Send a CacheSnapshot."""


@dataclass(frozen=True, slots=True)
class SetRole:
    """Take this role and join anew in it. The last thing that an incarnation is told."""

    role: Role


NodeOrder = Submit | Prefill | GiveTicket | Cancel | PeerGone | CacheQuery | SetRole

# what the shell is to do, in this order


@dataclass(frozen=True, slots=True)
class Send:
    node: Incarnation
    message: NodeOrder


@dataclass(frozen=True, slots=True)
class Admit:
    """The request is accepted for good: from here on only its own end ends it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Emit:
    """`scores`: one for each token if the request asks for them, else none."""

    request: RequestId
    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class EmitPromptScores:
    """All of them, once, before the first Emit."""

    request: RequestId
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The good end. `cached_tokens`: prompt tokens that the first placement did not have to compute."""

    reason: FinishReason
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal event. `tokens` is the number of tokens the client was sent; `ttft` is None without any;
    `internal` marks a request that no client made; `tenant_class` labels it."""

    request: RequestId
    result: Finished | BatonError
    tokens: int
    timeline: Timeline
    ttft: float | None
    internal: bool
    tenant_class: str = "default"


@dataclass(frozen=True, slots=True)
class Replaced:
    """An attempt is given up and its request will be placed again: for the log, nothing is to be done."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The incarnation is a member no more: its stream is to end. `expected`: it was told to join anew."""

    node: Incarnation
    name: NodeName
    error: BatonError
    expected: bool = False


@dataclass(frozen=True, slots=True)
class PairChanged:
    """The circuit breaker between two nodes, likewise for the log."""

    prefill: NodeName
    decode: NodeName
    state: BreakerState


@dataclass(frozen=True, slots=True)
class Switched:
    """A change of role is over, for the log and the metrics. `outcome`: done, recalled (while draining), superseded
    (before it counted), or lost (the node came back as what it was, or not at all). Seconds of each phase; 0 of those
    that were not reached."""

    node: NodeName
    source: Role
    to: Role
    outcome: str
    drain: float
    switch: float
    probe: float
    detail: str
    generation: int


@dataclass(frozen=True, slots=True)
class Steered:
    """The ratio was changed so that an objective is kept: for the log."""

    target: Split
    reason: str


@dataclass(frozen=True, slots=True)
class Degraded:
    """A step of degradation was taken, or taken back: for the log, nothing is to be done."""

    step: str
    taken: bool
    pressure: float


Effect = Degraded | Send | Admit | EmitPromptScores | Emit | End | Replaced | Lost | PairChanged | Switched | Steered
