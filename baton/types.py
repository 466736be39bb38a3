"""Types that several processes share. docs/architecture.md has the table of owners.

A *request* is one choice that a client asked for. An *attempt* is one try at serving it: everything
inside the cluster is keyed by `AttemptKey`, and messages of other attempts are dropped. A *ticket*
is the decode node's permission to write certain blocks for some time. A node's own work on an
attempt is a `Sequence` (node_engine/core/sequences/sequence.py), which never leaves the process.
"""

import hashlib
import secrets
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

# 128 random bits in hex, minted by the coordinator, never by a client.
RequestId = NewType("RequestId", str)
# 128 random bits in hex, minted by the decode node.
TicketId = NewType("TicketId", str)
# 64 random bits in hex, minted by the coordinator at each join of a node.
Incarnation = NewType("Incarnation", str)
NodeName = NewType("NodeName", str)
BlockIndex = NewType("BlockIndex", int)  # of a block in this process's address range
# Between processes; see kv_transfer/transports/links.py.
STAGED_TRANSPORTS = ("shm", "zmq", "grpc")  # through host memory
TRANSPORTS = ("cuda_ipc", *STAGED_TRANSPORTS)


def mint_id(bits: int = 128) -> str:
    """Return a random id in hex from the operating system's generator."""
    return secrets.token_hex(bits // 8)


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why a generation ended normally. Any other end is an error."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens


class GrammarKind(Enum):
    """What the text of a `StructuredOutput` is."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # a regular expression that the whole output matches
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # a context-free grammar, as Lark or GBNF writes it
    STRUCTURAL_TAG = "structural_tag"  # JSON: tags whose contents follow schemas, in free text


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The grammar of an output. Its state is a function of this value and the output tokens.

    To make the model write a call of a tool, give `GrammarKind.JSON` with the schema of its
    arguments, or `GrammarKind.GRAMMAR` with a Lark grammar in which `%json {...}` stands for them.
    """

    kind: GrammarKind
    text: str  # at most MAX_GRAMMAR_BYTES of UTF-8

    @property
    def digest(self) -> bytes:
        """The key of caches of compiled grammars."""
        spelled = f"{self.kind.value}\0{self.text}"
        return hashlib.sha256(spelled.encode(errors="surrogatepass")).digest()


class AttemptKey(NamedTuple):
    """The key of tokens, tickets, sequences and cancellations."""

    request_id: RequestId
    attempt_number: int
    choice_index: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt_number}.{self.choice_index}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Checked at admission (baton/limits.py) and again by the node."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    # The coordinator mints a seed if the client gives none, so that a resumed attempt draws the
    # same noise.
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0  # 0 is off
    presence_penalty: float = 0.0  # counts output tokens
    frequency_penalty: float = 0.0  # counts output tokens
    repetition_penalty: float = 1.0  # counts prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), added to the logits
    # Number of most likely tokens to report with each output token's log probability; None: off.
    logprobs: int | None = None
    # Likewise for prompt tokens. The prompt is then computed without any prefix cache.
    prompt_logprobs: int | None = None
    # The grammar that the output obeys; None: any output.
    structured_output: StructuredOutput | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether there is any penalty; without one, tokens need not be counted."""
        return (
            bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant that a request is charged to. It follows from the credential, not the body."""

    tenant: str = "default"
    tenant_class: str = "default"  # labels metrics and device seconds
    priority_level: int = 0  # of the class, in strict order; 0 is served first


DEFAULT_PRINCIPAL = Principal()


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of what a client asked for. Several choices are separate requests."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_seconds: float  # time left when it is sent: clocks of hosts are never compared
    cache_salt: bytes = b""
    choice_index: int = 0  # among the choices of the client's request; sampling depends on it
    principal: Principal = DEFAULT_PRINCIPAL
    # A request with the same prompt. This one is placed on the decode node that has the leader's
    # prompt in its cache, once it is there, so that the prompt is computed once and its blocks are
    # shared. If that is impossible, it is placed like any other. Nodes are not told.
    leader_id: RequestId | None = None
    # In which the grammar of the output was compiled before admission. Nodes are not told.
    grammar_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt as a node receives it."""

    key: AttemptKey
    request: Request
    # Tokens that the client already has. They are part of the context, count towards max_tokens
    # and are never sent again.
    emitted_token_ids: tuple[int, ...] = ()
    # The class that is charged for computing the context: the one that preempted the attempt
    # before, or "" for the request's own class.
    prefill_charged_class: str = ""
    # Digest of the model identity that the request is bound to (baton/models/model_identity.py).
    identity_digest: bytes = b""

    @property
    def context_token_ids(self) -> tuple[int, ...]:
        """Every token whose KV must exist before the next token can be computed."""
        return self.request.prompt_token_ids + self.emitted_token_ids


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A node or pool as its peers address it. The incarnation identifies it, not the address."""

    name: NodeName
    incarnation: Incarnation
    host_id: str
    transfer_endpoint: str  # "tcp://host:port" of the node's transfer socket


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """A shared-memory segment in a message."""

    name: str  # file name in the segment folder
    incarnation: Incarnation  # of the node that created it


@dataclass(frozen=True, slots=True)
class Ticket:
    """A decode node's permission for one writer to write certain blocks for a limited time."""

    id: TicketId
    key: AttemptKey
    decode_peer: PeerAddress
    writer_incarnation: Incarnation
    # Logical block of the context that is written first. The decode node has those before it.
    first_block: int
    block_offsets: tuple[int, ...]  # byte offsets in `segment` of the blocks to write
    num_tokens: int
    ttl_seconds: float  # from receipt
    transport: str  # the backend that the decode node chose
    segment: SegmentRef  # the decode node's arena
    # Byte of the fence file that a one-sided writer locks while it writes (docs/protocol.md).
    fence_byte: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one token and of the most likely ones at its position.

    They are the natural log softmax of the model's logits, before bias, penalties, temperature and
    filters.
    """

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log probability), best first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token."""

    key: AttemptKey
    output_index: int  # position in the request's output, by which gaps and repeats are detected
    token_id: int
    finish_reason: FinishReason | None = None  # set on the last token
    logprobs: TokenLogprobs | None = None  # set if the request asks for it
