"""What the clients of a load saw: every operation with its events, in order."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from baton.types import TokenLogprobs

GRACE_SECONDS = 5.0  # seconds beyond its deadline in which an operation must have ended


class ClientApi(Enum):
    """The APIs that clients use."""

    SSE = "sse"
    HTTP = "http"
    GRPC_STREAM = "grpc-stream"
    GRPC_ONCE = "grpc-once"

    @property
    def is_streaming(self) -> bool:
        return self in (ClientApi.SSE, ClientApi.GRPC_STREAM)


@dataclass(frozen=True, slots=True)
class ClientCall:
    """What a client asks for, and when it cancels."""

    api: ClientApi
    prompt: tuple[int, ...]
    max_tokens: int
    timeout_seconds: float
    cancel_after_tokens: int | None = None  # streams only
    cancel_after_seconds: float | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # gRPC only
    echo: bool = False  # gRPC only
    # Samples with temperature and penalties; for engines whose tokens do not depend on sampling.
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A part of the output of one choice."""

    tokens: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt, or the next part of it, returned because of `echo`."""

    tokens: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The request that the operation became, as its answer says."""

    request_id: str
    model_digests: tuple[str, ...] = ()  # of all its nodes; empty if the API does not say


@dataclass(frozen=True, slots=True)
class Finished:
    """The server said that the output is complete."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server returned an error, or could not be reached."""

    code: str  # a name of grpc.StatusCode
    message: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of the protocol: `[DONE]`, a complete body, status OK, or the connection's end."""

    is_orderly: bool  # False if the connection ended in the middle of an answer


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The connection ended before the server had sent anything."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The client cancelled the call or disconnected."""


@dataclass(frozen=True, slots=True)
class Hung:
    """No end came long after the deadline, and the client stopped waiting."""


Event = (
    Tokens
    | EchoedPrompt
    | RequestIdentity
    | Finished
    | Failed
    | Closed
    | Unanswered
    | GaveUp
    | Hung
)
_ENDS = (Failed, Closed, Unanswered, GaveUp, Hung)


@dataclass(slots=True)
class Operation:
    """One call and its events, each with its time in seconds on one clock."""

    number: int
    call: ClientCall
    started_at: float
    events: list[tuple[float, Event]] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.get_output(0).tokens

    @property
    def choices(self) -> frozenset[int]:
        """Numbers of the choices of which anything has been received."""
        return frozenset(
            event.choice for _, event in self.events if isinstance(event, Tokens | EchoedPrompt)
        )

    def get_output(self, choice: int) -> Tokens:
        """All tokens and scores received of a choice."""
        parts = [
            event
            for _, event in self.events
            if isinstance(event, Tokens) and event.choice == choice
        ]
        tokens = tuple(token for part in parts for token in part.tokens)
        return Tokens(tokens, choice, tuple(score for part in parts for score in part.scores))

    def get_echoes(self, choice: int) -> list[EchoedPrompt]:
        return [
            event
            for _, event in self.events
            if isinstance(event, EchoedPrompt) and event.choice == choice
        ]

    @property
    def end(self) -> Event | None:
        return next((event for _, event in self.events if isinstance(event, _ENDS)), None)

    @property
    def finished(self) -> Finished | None:
        return next((event for _, event in self.events if isinstance(event, Finished)), None)

    @property
    def identity(self) -> RequestIdentity | None:
        return next((event for _, event in self.events if isinstance(event, RequestIdentity)), None)

    def __str__(self) -> str:
        call = self.call
        asked = f"{call.n}x" if call.n > 1 else ""
        asked += " stop" if call.stop_token_ids else ""
        asked += " echo" if call.echo else ""
        asked += "" if call.logprobs is None else f" logprobs={call.logprobs}"
        sizes = f"{len(call.prompt)}+{call.max_tokens}"
        return f"#{self.number} {call.api.value} {sizes} {asked}".rstrip()


class History:
    """Every operation of a load, in the order in which they began."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def begin_operation(self, call: ClientCall, now: float) -> Operation:
        operation = Operation(len(self.operations), call, now)
        self.operations.append(operation)
        return operation

    def count_outcomes(self) -> Counter[str]:
        """How many operations ended in which way."""
        return Counter(_outcome(operation) for operation in self.operations)


def _outcome(operation: Operation) -> str:
    match operation.end:
        case Failed(code):
            return code
        case Closed(True):
            return "finished"
        case None:
            return "open"
        case other:
            return type(other).__name__.lower()
