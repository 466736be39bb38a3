"""The nouns of the system. One meaning each; docs/architecture.md has the table of owners.

*Request* is what the client asked: frozen, crosses the wire. *Attempt* is one try at serving it; everything that
happens inside the cluster is keyed by `AttemptKey`, and messages of other attempts are dropped.
*Ticket* is the decode node's promise "write these blocks, here, for so long". A node's own work on
an attempt is a `Sequence` (node_engine/core/sequences/sequence.py) and never leaves the process.
"""

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

RequestId = NewType(
    "RequestId", str
)  # 128 random bits in hex, minted by the coordinator, never by a client
TicketId = NewType("TicketId", str)  # 128 random bits in hex, minted by the decode node
Incarnation = NewType(
    "Incarnation", str
)  # 64 random bits in hex, minted by the coordinator at each join
NodeName = NewType("NodeName", str)
BlockIndex = NewType("BlockIndex", int)  # index of a block in this process's arena


def mint_id(bits: int = 128) -> str:
    """A random id in hex from the operating system's generator."""
    return secrets.token_hex(bits // 8)


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why a generation ended well. Everything else is an error."""

    STOP = "stop"
    LENGTH = "length"


class AttemptKey(NamedTuple):
    """What tokens, tickets, sequences and cancels are keyed by."""

    request_id: RequestId
    attempt_number: int
    choice_index: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt_number}.{self.choice_index}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; validated at admission (baton/limits.py) and again by the node.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1.0 and `min_p` 0 switch those filters off. `seed`
    is always set: the coordinator mints one when the client gave none, so that a resumed attempt
    draws the same noise. Presence and frequency penalties count the output, the repetition penalty
    the prompt as well. `logit_bias` is (token id, bias) pairs, added to the logits. `logprobs`:
    score every token of the output, beside so many of the most likely ones; None is off.
    `prompt_logprobs`: likewise of the prompt, which is then computed without a look at any prefix
    cache.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose account a request runs. `tenant_class` labels metrics and device seconds;
    `priority_level` is the place of that class in the strict order, 0 is served first. It follows
    from the credential, never from the body alone."""

    tenant: str = "default"
    tenant_class: str = "default"
    priority_level: int = 0


DEFAULT_PRINCIPAL = Principal()


@dataclass(frozen=True, slots=True)
class Request:
    """What the client asked, one choice of it: several choices are requests of their own.
    `timeout_seconds` is seconds left at the moment of sending: clocks are never compared."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_seconds: float
    cache_salt: bytes = b""
    choice_index: int = 0
    principal: Principal = DEFAULT_PRINCIPAL


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt as a node receives it. `emitted_token_ids` are tokens that the client already
    has: they are part of the context, count towards max_tokens and are never sent again.
    `prefill_charged_class` is the class that the computing of the context is charged to, "" for the
    request's own: whoever preempted the attempt before pays for computing it again.
    `identity_digest` is the digest of the identity that the request is bound to
    (baton/models/model_identity.py).
    """

    key: AttemptKey
    request: Request
    emitted_token_ids: tuple[int, ...] = ()
    prefill_charged_class: str = ""
    identity_digest: bytes = b""

    @property
    def context_token_ids(self) -> tuple[int, ...]:
        """Every token whose KV must exist before the next token can be computed."""
        return self.request.prompt_token_ids + self.emitted_token_ids


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A node as another node sees it. Identity is the incarnation; the address alone never is."""

    name: NodeName
    incarnation: Incarnation
    host_id: str
    transfer_endpoint: str  # "tcp://host:port" of the node's transfer socket


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A shared-memory segment on the wire: its file name in the segment folder and the incarnation
    that holds it."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Ticket:
    """Decode's promise: this writer may write these blocks, for so long.

    Logical blocks `first_block .. first_block + len(offsets)` of the context are to be written;
    those before `first_block` are already on the decode node. `block_offsets` are byte offsets of
    those blocks in the decode arena `segment`. `ttl_seconds` is seconds from receipt. `fence_byte`
    is the byte of the arena's fence file that a one-sided writer locks for as long as it may write
    (docs/protocol.md). `transport` names the backend that decode chose.
    """

    id: TicketId
    key: AttemptKey
    decode_peer: PeerAddress
    writer_incarnation: Incarnation
    first_block: int
    block_offsets: tuple[int, ...]
    num_tokens: int
    ttl_seconds: float
    transport: str
    segment: SegmentRef
    fence_byte: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own distribution: log softmax of its
    logits, before bias, penalties, temperature and filters. `top_logprobs` holds the most likely
    (token id, log probability), the best first."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. `output_index` is its place in the request's output, so that a gap or a
    repeat is seen. `logprobs` is there if `logprobs` asks for it."""

    key: AttemptKey
    output_index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
