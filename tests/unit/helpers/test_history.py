"""The judge is judged: each breach must be seen, and nothing else."""

from collections.abc import Sequence

import pytest

from baton.pb.common_pb2 import Ledger, LedgerOwner
from baton.types import TokenLogprobs
from tests.history import (
    GRACE_SECONDS,
    ClientApi,
    ClientCall,
    Closed,
    EchoedPrompt,
    Event,
    Failed,
    Finished,
    GaveUp,
    History,
    Hung,
    Operation,
    RequestIdentity,
    Tokens,
    Unanswered,
)
from tests.history_checks import find_mixed_models, find_violations
from tests.ledger_checks import find_held_blocks, find_unbalanced_ledgers

TIMEOUT = 5.0


def reference(prompt: Sequence[int], n: int) -> list[int]:
    return [sum(prompt) + i for i in range(n)]


def operation(*events: Event, door: ClientApi = ClientApi.SSE, last_at: float = 1.0) -> Operation:
    made = History().begin_operation(ClientCall(door, (10, 20), 3, TIMEOUT), now=0.0)
    made.events = [(last_at, event) for event in events]
    return made


def violations_of(*events: Event, cut_excused: bool = False, last_at: float = 1.0) -> list[str]:
    return find_violations(
        [operation(*events, last_at=last_at)], reference, cut_excused=cut_excused
    )


def test_mixed_models_are_found_in_one_answer_and_between_answers() -> None:
    one, other, both = (
        RequestIdentity("a", ("m",)),
        RequestIdentity("b", ("n",)),
        RequestIdentity("c", ("m", "n")),
    )
    assert find_mixed_models([one, one, None, RequestIdentity("d")]) == []
    assert find_mixed_models([one, one, both]) == [
        "I7: request c was placed on nodes of model m and n, others on m"
    ]
    assert find_mixed_models([one, one, other]) == [
        "I7: request b was placed on nodes of model n, others on m"
    ]
    assert violations_of(*RIGHT[:2], both, *RIGHT[2:]) == [
        "I7: request c was placed on nodes of model m and n, others on m"
    ]
    assert violations_of(*RIGHT[:2], one, *RIGHT[2:]) == []


@pytest.mark.parametrize("door", list(ClientApi))
@pytest.mark.parametrize("served", [(), (RequestIdentity("a"),)], ids=["nothing", "no-model"])
def test_grpc_answer_without_a_model_is_a_violation(
    door: ClientApi, served: tuple[Event, ...]
) -> None:
    silent = operation(*RIGHT[:2], *served, *RIGHT[2:], door=door)
    tells = door in (ClientApi.GRPC_STREAM, ClientApi.GRPC_ONCE)
    assert [line.partition(": ")[2] for line in find_violations([silent], reference)] == (
        ["I7: finished and names no model"] if tells else []
    )
    failed = operation(*served, Failed("UNAVAILABLE"), door=door)
    assert find_violations([failed], reference) == []


RIGHT = (Tokens((30, 31)), Tokens((32,)), Finished("length", 2, 3), Closed(True))


@pytest.mark.parametrize(
    "events",
    [
        RIGHT,
        (Failed("UNAVAILABLE"),),
        (Tokens((30,)), Failed("DEADLINE_EXCEEDED")),
        (GaveUp(),),
        (Tokens((30, 31)), GaveUp()),
        (Tokens((30, 31, 32)), Finished("length", 2, 3), GaveUp()),
    ],
    ids=str,
)
def test_right_answers_and_excused_errors_pass(events: tuple[Event, ...]) -> None:
    assert violations_of(*events) == []


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (
            (Tokens((30, 99, 32)), Finished("length", 2, 3), Closed(True)),
            "I2: token 1 of 3 is wrong",
        ),
        ((Tokens((31,)), Failed("UNAVAILABLE")), "I2: token 0 of 3 is wrong"),
        ((Tokens((99,)), GaveUp()), "I2: token 0 of 3 is wrong"),
        ((Tokens((30, 31, 32, 33)), Failed("UNAVAILABLE")), "I2: token 3 of 3 is wrong"),
        ((Tokens((30, 30)), Failed("UNAVAILABLE")), "I2: token 1 of 3 is wrong"),
        (
            (Tokens((30, 31)), Finished("length", 2, 2), Closed(True)),
            "I2: finished (length) with 2 of 3",
        ),
        ((Finished("length", 2, 3), Closed(True)), "I2: finished (length) with 0 of 3"),
        ((Tokens((30, 31, 32)), Finished("length", 5, 3), Closed(True)), "I2: usage says (5, 3)"),
        ((), "I3: has no end"),
        ((Tokens((30,)),), "I3: has no end"),
        ((Tokens((30,)), Closed(False)), "I3: ended without a word"),
        ((Tokens((30,)), Closed(True)), "never said that it had finished"),
        ((Failed("INTERNAL", "boom"),), "I3: ended in INTERNAL: boom"),
        ((Failed("CANCELLED"),), "I3: ended in CANCELLED"),
        ((*RIGHT, Failed("UNAVAILABLE")), "I3: more than one end"),
        ((*RIGHT, Closed(True)), "I3: more than one end"),
        ((Failed("UNAVAILABLE"), Failed("UNAVAILABLE")), "I3: more than one end"),
        ((*RIGHT[2:], *RIGHT[:2]), "I3: tokens after the end"),
        ((Tokens((30,)), Hung()), "I3: hung"),
        ((Unanswered(),), "I3: was not answered"),
    ],
    ids=str,
)
def test_every_violation_is_found(events: tuple[Event, ...], complaint: str) -> None:
    assert any(complaint in line for line in violations_of(*events)), violations_of(*events)


def test_late_end_is_a_violation() -> None:
    assert violations_of(*RIGHT, last_at=TIMEOUT + GRACE_SECONDS - 0.1) == []
    assert any(
        "after its deadline" in line
        for line in violations_of(*RIGHT, last_at=TIMEOUT + GRACE_SECONDS + 0.1)
    )


def test_a_killed_coordinator_excuses_a_silent_end_and_nothing_else() -> None:
    assert violations_of(Tokens((30,)), Closed(False), cut_excused=True) == []
    assert violations_of(*RIGHT[:-1], Failed("UNAVAILABLE"), cut_excused=True) == []
    assert violations_of(Tokens((99,)), Closed(False), cut_excused=True)
    assert violations_of(*RIGHT[:-1], Failed("INTERNAL"), cut_excused=True)
    assert violations_of(*RIGHT, Failed("UNAVAILABLE"), cut_excused=True)


def test_stopping_coordinator_need_not_answer_late_clients() -> None:
    assert find_violations([operation(Unanswered())], reference, stop_excused=True) == []
    assert find_violations([operation(Tokens((30,)), Closed(False))], reference, stop_excused=True)


def test_outcomes_are_counted_by_their_ends() -> None:
    history = History()
    history.operations = [
        operation(*RIGHT),
        operation(Failed("UNAVAILABLE")),
        operation(GaveUp()),
        operation(),
    ]
    assert history.count_outcomes() == {"finished": 1, "UNAVAILABLE": 1, "gaveup": 1, "open": 1}


def ledger(**counts: int) -> Ledger:
    made = Ledger(node="decode-0", total=10)
    for state, blocks in counts.items():
        setattr(made, state, blocks)
        if state != "free":
            made.owners.append(LedgerOwner(owner="a", state=state, blocks=blocks))
    return made


def test_a_ledger_must_balance_and_account_for_what_is_held() -> None:
    assert find_unbalanced_ledgers([ledger(free=6, in_use=4)]) == []
    assert find_unbalanced_ledgers([ledger(free=6, in_use=3)]) != []
    assert find_unbalanced_ledgers([Ledger(node="decode-0", total=10, free=6, in_use=4)]) != []


def test_cache_may_stay_when_traffic_stops_and_nothing_else() -> None:
    assert find_held_blocks([ledger(free=6, cached=4)]) == []
    for state in ("reserved", "writing", "in_use", "quarantined"):
        assert find_held_blocks([ledger(free=6, **{state: 4})])
    assert find_held_blocks([Ledger(node="decode-0", total=10, free=6, quarantined=4)])


# what is asked for beside one plain output


def scorer(tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(token)) for token in tokens[1:]]


def violations_of_call(call: ClientCall, *events: Event) -> list[str]:
    made = History().begin_operation(call, now=0.0)
    made.events = [(1.0, event) for event in (RequestIdentity("a", ("m",)), *events)]
    return find_violations([made], reference, scorer=scorer)


TWO_CHOICES = ClientCall(
    ClientApi.GRPC_STREAM, (10, 20), 3, TIMEOUT, n=2, stop_token_ids=(31,), logprobs=0, echo=True
)
SCORED = (TokenLogprobs(-30.0), TokenLogprobs(-31.0))
PARTS: tuple[Event, ...] = (
    EchoedPrompt((10, 20), 0, (TokenLogprobs(-20.0),)),
    EchoedPrompt((10, 20), 1, (TokenLogprobs(-20.0),)),
    Tokens((30, 31), 1, SCORED),
    Tokens((30,), 0, SCORED[:1]),
    Tokens((31,), 0, SCORED[1:]),
    Finished("stop", 2, 4),
    Closed(True),
)


def test_choices_that_stop_with_scores_behind_their_prompt_pass() -> None:
    assert violations_of_call(TWO_CHOICES, *PARTS) == []
    assert violations_of_call(TWO_CHOICES, *PARTS[:4], GaveUp()) == []
    in_parts = (EchoedPrompt((10,), 0), EchoedPrompt((20,), 0, (TokenLogprobs(-20.0),)))
    assert violations_of_call(TWO_CHOICES, *in_parts, *PARTS[1:]) == []
    assert violations_of_call(TWO_CHOICES, in_parts[0], GaveUp()) == []


@pytest.mark.parametrize(
    ("place", "instead", "complaint"),
    [
        (0, (), "choice 0: 0 tokens of the prompt were echoed in 0 parts"),
        (0, (PARTS[0], PARTS[0]), "choice 0: 4 tokens of the prompt were echoed in 2 parts"),
        (
            1,
            (EchoedPrompt((10, 20), 1),),
            "choice 1: 2 tokens of the prompt were echoed in 1 parts, or altered",
        ),
        (2, (Tokens((30, 32), 1, SCORED),), "choice 1: token 1 of 2 is wrong"),
        (2, (Tokens((30, 31), 2, SCORED),), "choices [2] were not asked for"),
        (2, (Tokens((30, 31), 1, SCORED[:1]),), "choice 1: the scores of 2 tokens are wrong: 1"),
        (3, (Tokens((30,), 0, SCORED[1:]),), "choice 0: the scores of 2 tokens are wrong"),
        (4, (), "choice 0: finished (stop) with 1 of 2 tokens"),
        (5, (Finished("stop", 2, 2),), "usage says (2, 2), not (2, 4)"),
    ],
    ids=str,
)
def test_every_violation_of_request_options_is_found(
    place: int, instead: tuple[Event, ...], complaint: str
) -> None:
    lines = violations_of_call(TWO_CHOICES, *PARTS[:place], *instead, *PARTS[place + 1 :])
    assert any(complaint in line for line in lines), lines
