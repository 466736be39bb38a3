"""A pure checker that finds violations of the invariants in what the clients of a load saw.

The invariants, by the names used in violations:

    I1 conservation    every ledger balances at all times; nothing is held once traffic has stopped
                       (tests/ledger_checks.py)
    I2 right or error  a client gets the reference's output, or a prefix of it that ends in an error
    I3 one end         every operation has exactly one terminal event, in time
    I4 isolation       follows from I2 where tokens depend on what the KV blocks hold
    I5 blast radius    a process that was no target neither ends nor is started again
    I6 self-heal       once the fault is over, service is back within a bound
    I7 one model       every answer comes from nodes of one identity, and all of them from the same
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from baton.types import TokenLogprobs
from tests.history import (
    GRACE_SECONDS,
    ClientApi,
    Closed,
    EchoedPrompt,
    Failed,
    Hung,
    Operation,
    RequestIdentity,
    Tokens,
    Unanswered,
)

# Codes (names of grpc.StatusCode, which every error of ours has) that a fault excuses. Anything
# else is a defect.
EXCUSED_CODES = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})


# (prompt, max_tokens) -> the complete output
Reference = Callable[[Sequence[int], int], Sequence[int]]


# (tokens, top) -> scores of all of them but the first
Scorer = Callable[[Sequence[int], int], Sequence[TokenLogprobs]]


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
    """Violations of I2, I3 and I7, one line each.

    With `cut_excused` the coordinator was killed, which resets its clients' connections. With
    `stop_excused` it was stopped by SIGTERM, and connections made at that moment may go unanswered.
    `scorer` checks the scores of calls that ask for them; without it, none are expected.
    """
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
    """Complete gRPC answers that name no model: I7 would have nothing to check."""
    return [
        f"{operation}: I7: finished and names no model"
        for operation in operations
        if operation.finished is not None
        and operation.call.api in (ClientApi.GRPC_STREAM, ClientApi.GRPC_ONCE)
        and (operation.identity is None or not operation.identity.model_digests)
    ]


def find_mixed_models(answers: Iterable[RequestIdentity | None]) -> list[str]:
    """Violations of I7: requests placed on nodes of different models, or of other models than the
    majority of requests."""
    told = [answer for answer in answers if answer is not None and answer.model_digests]
    usual = Counter(model for answer in told for model in answer.model_digests).most_common(1)
    return [
        f"I7: request {answer.request_id} was placed on nodes of model "
        f"{' and '.join(answer.model_digests)}, others on {usual[0][0]}"
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
            f"token {at} of {len(right)} is wrong, of {len(tokens)} received "
            f"({_describe_end(operation)})"
        ]
    if finished is not None and tokens != right:
        return [f"finished ({finished.finish_reason}) with {len(tokens)} of {len(right)} tokens"]
    return []


def _score_violations(
    operation: Operation, choice: int, right: tuple[int, ...], scorer: Scorer | None
) -> list[str]:
    """There must be one score per token, and each must be the scorer's."""
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
    """The prompt must be echoed completely before any output, with its scores if asked for."""
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
            f"{len(prompt)} tokens of the prompt were echoed in {len(echoed)} parts, or altered"
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
    # gRPC reports a reset connection as the status that the killed server could not send.
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
