"""What the clients of a load saw, and what is wrong with it. Pure: events in, complaints out.

The invariants, by the names used in complaints:

    I1 conservation    every ledger balances at every look, and nothing is held once traffic has stopped
    I2 right or error  what a client got is the reference's output, or a beginning of it that ends in an error
    I3 one end         every operation has exactly one terminal event, in time
    I4 isolation       follows from I2 where tokens depend on what the KV blocks hold
    I5 blast radius    a process that was no target neither ends nor is started again
    I6 self-heal       once the fault is over, service is back within a bound
    I7 one model       every answer comes from nodes of one identity, and all of them from the same
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.pb.common_pb2 import Ledger
from baton.types import TokenLogprobs

GRACE_SECONDS = 5.0  # seconds beyond its deadline in which an operation must have ended

# Codes (names of grpc.StatusCode, which every error of ours has) that a fault excuses. Anything
# else is a defect.
EXCUSED_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})

Reference = Callable[
    [Sequence[int], int], Sequence[int]
]  # (prompt, max_tokens) -> the whole output
Scorer = Callable[
    [Sequence[int], int], Sequence[TokenLogprobs]
]  # (tokens, top) -> scores of all of them but the first


class ClientApi(Enum):
    """The ways in."""

    SSE = "sse"
    HTTP = "http"
    GRPC_STREAM = "grpc-stream"
    GRPC_ONCE = "grpc-once"

    @property
    def is_streaming(self) -> bool:
        return self in (ClientApi.SSE, ClientApi.GRPC_STREAM)


@dataclass(frozen=True, slots=True)
class ClientCall:
    """What a client asks. `timeout_seconds` in seconds; `cancel_after_tokens` tokens (streams only)
    or `cancel_after_seconds` seconds it goes away. `logprobs` and `echo` through gRPC only. With
    `seed` the draw is one that takes noise and penalties: for engines whose tokens do not depend on
    it."""

    api: ClientApi
    prompt: tuple[int, ...]
    max_tokens: int
    timeout_seconds: float
    cancel_after_tokens: int | None = None
    cancel_after_seconds: float | None = None
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt, or the next part of it, given back."""

    tokens: tuple[int, ...]
    choice: int = 0
    scores: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """Which request it became, and the digests of all models that its nodes have; () through doors
    that do not tell."""

    request_id: str
    model_digests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The server said that the output is complete."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The server said that there is no more, or could not be reached. `code` is a name of
    grpc.StatusCode."""

    code: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """The protocol's own end: `[DONE]`, a whole body, status OK. Not `is_orderly` if the connection
    just ended."""

    is_orderly: bool


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The connection ended before the server had said anything."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The client's last patience was over."""


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
    """One call and its events, in seconds of one clock."""

    number: int
    call: ClientCall
    started_at: float
    events: list[tuple[float, Event]] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the first choice."""
        return self.get_output(0).tokens

    @property
    def choices(self) -> frozenset[int]:
        """Those of which anything has come."""
        return frozenset(
            event.choice for _, event in self.events if isinstance(event, Tokens | EchoedPrompt)
        )

    def get_output(self, choice: int) -> Tokens:
        """All that has come of a choice."""
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
        return (
            f"#{self.number} {call.api.value} {len(call.prompt)}+{call.max_tokens} {asked}".rstrip()
        )


class History:
    """Every operation of a load, in the order of their beginnings."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def begin_operation(self, call: ClientCall, now: float) -> Operation:
        operation = Operation(len(self.operations), call, now)
        self.operations.append(operation)
        return operation

    def count_outcomes(self) -> Counter[str]:
        """How many operations ended in which way: what a round was like."""
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


def find_violations(
    operations: Sequence[Operation],
    reference: Reference,
    *,
    scorer: Scorer | None = None,
    excused: frozenset[str] = EXCUSED_CODES,
    cut_excused: bool = False,
    stop_excused: bool = False,
    grace: float = GRACE_SECONDS,
) -> list[str]:
    """Breaches of I2, I3 and I7, one line each. `cut_excused`: the coordinator itself was killed,
    which resets its clients' connections without a word. `stop_excused`: it was stopped in order,
    and who knocks at that very moment may not be heard. `scorer` for those that ask for scores."""
    found: list[str] = []
    for operation in operations:
        wrong = [
            *_content_violations(operation, reference, scorer),
            *_end_violations(operation, excused, cut_excused, stop_excused, grace),
        ]
        found += [f"{operation}: {line}" for line in wrong]
    return [
        *found,
        *find_unnamed_models(operations),
        *find_mixed_models(operation.identity for operation in operations),
    ]


def find_unnamed_models(operations: Iterable[Operation]) -> list[str]:
    """Answers that are complete and name no model, through the doors that tell: I7 would hold of
    nothing."""
    return [
        f"{operation}: I7: finished and names no model"
        for operation in operations
        if operation.finished is not None
        and operation.call.api in (ClientApi.GRPC_STREAM, ClientApi.GRPC_ONCE)
        and (operation.identity is None or not operation.identity.model_digests)
    ]


def find_mixed_models(answers: Iterable[RequestIdentity | None]) -> list[str]:
    """Breaches of I7: requests of one cluster that were placed on nodes of different models, or on
    models that all the others were not."""
    told = [answer for answer in answers if answer is not None and answer.model_digests]
    usual = Counter(model for answer in told for model in answer.model_digests).most_common(1)
    return [
        f"I7: request {answer.request_id} was placed on nodes of model {' and '.join(answer.model_digests)}, "
        f"others on {usual[0][0]}"
        for answer in told
        if answer.model_digests != (usual[0][0],)
    ]


def _content_violations(
    operation: Operation, reference: Reference, scorer: Scorer | None
) -> list[str]:
    call, finished = operation.call, operation.finished
    if not operation.choices and finished is None:
        return []
    right = _until_stop(tuple(reference(call.prompt, call.max_tokens)), call.stop_token_ids)
    strays = operation.choices - set(range(call.n))
    wrong = [f"I2: choices {sorted(strays)} were not asked for"] if strays else []
    for choice in range(call.n):
        lines = [
            *_token_violations(operation, choice, right),
            *_echo_violations(operation, choice, scorer),
        ]
        lines += _score_violations(operation, choice, right, scorer)
        wrong += [f"I2: choice {choice}: {line}" if call.n > 1 else f"I2: {line}" for line in lines]
    if finished is not None:
        usage = (finished.prompt_tokens, finished.completion_tokens)
        expected = (len(call.prompt), call.n * len(right))
        if usage != expected:
            wrong.append(f"I2: usage says {usage}, not {expected}")
    return wrong


def _until_stop(output: tuple[int, ...], stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    stops = (at + 1 for at, token in enumerate(output) if token in stop_ids)
    return output[: next(stops, len(output))]


def _token_violations(operation: Operation, choice: int, right: tuple[int, ...]) -> list[str]:
    tokens, finished = operation.get_output(choice).tokens, operation.finished
    if tokens != right[: len(tokens)]:
        at = next(
            (i for i, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]),
            len(right),
        )
        return [
            f"token {at} of {len(right)} is wrong, of {len(tokens)} received ({_describe_end(operation)})"
        ]
    if finished is not None and tokens != right:
        return [f"finished ({finished.finish_reason}) with {len(tokens)} of {len(right)} tokens"]
    return []


def _score_violations(
    operation: Operation, choice: int, right: tuple[int, ...], scorer: Scorer | None
) -> list[str]:
    """As many as there are tokens, and each as it should be."""
    call, output = operation.call, operation.get_output(choice)
    expected: Sequence[TokenLogprobs] = ()
    if call.logprobs is not None and scorer is not None:
        expected = scorer((*call.prompt, *right), call.logprobs)[len(call.prompt) - 1 :][
            : len(output.tokens)
        ]
    if output.scores != tuple(expected):
        return [
            f"the scores of {len(output.tokens)} tokens are wrong: {len(output.scores)} have come"
        ]
    return []


def _echo_violations(operation: Operation, choice: int, scorer: Scorer | None) -> list[str]:
    """Before all else, whole, in one part or in several, and with its scores if any are asked
    for."""
    call, echoed = operation.call, operation.get_echoes(choice)
    scores: Sequence[TokenLogprobs] = ()
    if call.echo and call.logprobs is not None and scorer is not None:
        scores = scorer(call.prompt, call.logprobs)
    prompt = tuple(token for part in echoed for token in part.tokens)
    given = tuple(score for part in echoed for score in part.scores)
    begun = bool(operation.get_output(choice).tokens) or operation.finished is not None
    right = call.prompt if call.echo else ()
    whole = prompt == right and given == tuple(scores)
    part = prompt == right[: len(prompt)] and given == tuple(scores)[: len(given)]
    if not (whole if begun else part):
        return [
            f"{len(prompt)} tokens of the prompt were given back in {len(echoed)} parts, or not as it was"
        ]
    return []


def _end_violations(
    operation: Operation,
    excused: frozenset[str],
    cut_excused: bool,
    stop_excused: bool,
    grace: float,
) -> list[str]:
    if not operation.events or operation.end is None:
        return ["I3: has no end"]
    wrong = []
    kinds = [
        type(event).__name__
        for _, event in operation.events
        if not isinstance(event, Tokens | EchoedPrompt | RequestIdentity)
    ]
    match operation.end:
        case Failed(code, message) if code not in excused:
            wrong.append(f"I3: ended in {code}: {message}")
        case Closed(False) if not cut_excused:
            wrong.append("I3: ended without a word")
        case Unanswered() if not (cut_excused or stop_excused):
            wrong.append("I3: was not answered")
        case Closed(True) if operation.finished is None:
            wrong.append("I3: closed in order, but never said that it had finished")
        case Hung():
            wrong.append("I3: hung")
        case _:
            pass
    # gRPC tells of a connection that was reset with the status that the server did not live to
    # send.
    reset = (
        cut_excused and isinstance(operation.end, Failed) and operation.end.code == "UNAVAILABLE"
    )
    one = (
        kinds == ["Finished", "Closed"]
        or (reset and kinds == ["Finished", "Failed"])
        or kinds[-1] == "GaveUp"
    )
    if len(kinds) > 1 and not one:
        wrong.append(f"I3: more than one end: {kinds}")
    if isinstance(operation.events[-1][1], Tokens | EchoedPrompt):
        wrong.append("I3: tokens after the end")
    late = operation.events[-1][0] - operation.started_at - operation.call.timeout_seconds
    if late > grace:
        wrong.append(f"I3: ended {late:.1f} s after its deadline")
    return wrong


def _describe_end(operation: Operation) -> str:
    end = operation.finished or operation.end
    return "still open" if end is None else type(end).__name__.lower()


# I1

_STATES = ("free", "cached", "reserved", "writing", "in_use", "quarantined")
_HELD = ("reserved", "writing", "in_use", "quarantined")


def find_unbalanced_ledgers(ledgers: Iterable[Ledger]) -> list[str]:
    """Breaches of conservation that no moment excuses."""
    found = []
    for ledger in ledgers:
        counts = {state: int(getattr(ledger, state)) for state in _STATES}
        if sum(counts.values()) != ledger.total:
            found.append(
                f"I1: {ledger.node}: {counts} is {sum(counts.values())}, not {ledger.total}"
            )
        owned: Counter[str] = Counter()
        for owner in ledger.owners:
            owned[owner.state] += owner.blocks
        found += [
            f"I1: {ledger.node}: {counts[state]} blocks {state}, its owners have {owned[state]}"
            for state in _HELD
            if owned[state] < counts[state]
        ]
    return found


def find_held_blocks(ledgers: Iterable[Ledger]) -> list[str]:
    """What is not free and not cache: nothing, once traffic has stopped."""
    return [
        f"I1: {ledger.node}: {owner.blocks} blocks {owner.state} by {owner.owner} for {owner.age_seconds:.1f} s"
        for ledger in ledgers
        for owner in ledger.owners
        if owner.state in _HELD
    ] + [
        f"I1: {ledger.node}: {getattr(ledger, state)} blocks {state}"
        for ledger in ledgers
        for state in _HELD
        if getattr(ledger, state) and not any(owner.state == state for owner in ledger.owners)
    ]
