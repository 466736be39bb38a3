"""The judge is judged: each breach must be seen, and nothing else."""

from collections.abc import Sequence

import pytest

from baton.pb.common_pb2 import Ledger, LedgerOwner
from baton.types import TokenScore
from tests.history import (
    GRACE,
    Call,
    Closed,
    Door,
    Echoed,
    Event,
    Failed,
    Finished,
    GaveUp,
    History,
    Hung,
    Operation,
    Served,
    Tokens,
    Unanswered,
    complaints,
    held,
    mixed_models,
    unbalanced,
)

TIMEOUT = 5.0


def reference(prompt: Sequence[int], n: int) -> list[int]:
    return [sum(prompt) + i for i in range(n)]


def operation(*events: Event, door: Door = Door.SSE, last_at: float = 1.0) -> Operation:
    made = History().begin(Call(door, (10, 20), 3, TIMEOUT), now=0.0)
    made.events = [(last_at, event) for event in events]
    return made


def judged(*events: Event, cut_excused: bool = False, last_at: float = 1.0) -> list[str]:
    return complaints([operation(*events, last_at=last_at)], reference, cut_excused=cut_excused)


def test_two_models_are_seen_in_one_answer_and_between_answers() -> None:
    one, other, both = Served("a", ("m",)), Served("b", ("n",)), Served("c", ("m", "n"))
    assert mixed_models([one, one, None, Served("d")]) == []
    assert mixed_models([one, one, both]) == ["I7: request c was placed on nodes of model m and n, others on m"]
    assert mixed_models([one, one, other]) == ["I7: request b was placed on nodes of model n, others on m"]
    assert judged(*RIGHT[:2], both, *RIGHT[2:]) == ["I7: request c was placed on nodes of model m and n, others on m"]
    assert judged(*RIGHT[:2], one, *RIGHT[2:]) == []


@pytest.mark.parametrize("door", list(Door))
@pytest.mark.parametrize("served", [(), (Served("a"),)], ids=["nothing", "no-model"])
def test_an_answer_that_names_no_model_is_a_breach_where_the_door_tells(door: Door, served: tuple[Event, ...]) -> None:
    silent = operation(*RIGHT[:2], *served, *RIGHT[2:], door=door)
    tells = door in (Door.GRPC_STREAM, Door.GRPC_ONCE)
    assert [line.partition(": ")[2] for line in complaints([silent], reference)] == (
        ["I7: finished and names no model"] if tells else []
    )
    failed = operation(*served, Failed("UNAVAILABLE"), door=door)
    assert complaints([failed], reference) == []


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
def test_what_is_right_or_an_excused_error_passes(events: tuple[Event, ...]) -> None:
    assert judged(*events) == []


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ((Tokens((30, 99, 32)), Finished("length", 2, 3), Closed(True)), "I2: token 1 of 3 is wrong"),
        ((Tokens((31,)), Failed("UNAVAILABLE")), "I2: token 0 of 3 is wrong"),
        ((Tokens((99,)), GaveUp()), "I2: token 0 of 3 is wrong"),
        ((Tokens((30, 31, 32, 33)), Failed("UNAVAILABLE")), "I2: token 3 of 3 is wrong"),
        ((Tokens((30, 30)), Failed("UNAVAILABLE")), "I2: token 1 of 3 is wrong"),
        ((Tokens((30, 31)), Finished("length", 2, 2), Closed(True)), "I2: finished (length) with 2 of 3"),
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
def test_every_breach_is_seen(events: tuple[Event, ...], complaint: str) -> None:
    assert any(complaint in line for line in judged(*events)), judged(*events)


def test_an_end_that_comes_late_is_a_breach() -> None:
    assert judged(*RIGHT, last_at=TIMEOUT + GRACE - 0.1) == []
    assert any("after its deadline" in line for line in judged(*RIGHT, last_at=TIMEOUT + GRACE + 0.1))


def test_a_killed_coordinator_excuses_a_silent_end_and_nothing_else() -> None:
    assert judged(Tokens((30,)), Closed(False), cut_excused=True) == []
    assert judged(*RIGHT[:-1], Failed("UNAVAILABLE"), cut_excused=True) == []
    assert judged(Tokens((99,)), Closed(False), cut_excused=True)
    assert judged(*RIGHT[:-1], Failed("INTERNAL"), cut_excused=True)
    assert judged(*RIGHT, Failed("UNAVAILABLE"), cut_excused=True)


def test_a_stopping_coordinator_need_not_answer_who_comes_too_late() -> None:
    assert complaints([operation(Unanswered())], reference, stop_excused=True) == []
    assert complaints([operation(Tokens((30,)), Closed(False))], reference, stop_excused=True)


def test_outcomes_are_counted_by_their_ends() -> None:
    history = History()
    history.operations = [operation(*RIGHT), operation(Failed("UNAVAILABLE")), operation(GaveUp()), operation()]
    assert history.outcomes() == {"finished": 1, "UNAVAILABLE": 1, "gaveup": 1, "open": 1}


def ledger(**counts: int) -> Ledger:
    made = Ledger(node="decode-0", total=10)
    for state, blocks in counts.items():
        setattr(made, state, blocks)
        if state != "free":
            made.owners.append(LedgerOwner(owner="a", state=state, blocks=blocks))
    return made


def test_a_ledger_must_balance_and_account_for_what_is_held() -> None:
    assert unbalanced([ledger(free=6, in_use=4)]) == []
    assert unbalanced([ledger(free=6, in_use=3)]) != []
    assert unbalanced([Ledger(node="decode-0", total=10, free=6, in_use=4)]) != []


def test_cache_may_stay_when_traffic_stops_and_nothing_else() -> None:
    assert held([ledger(free=6, cached=4)]) == []
    for state in ("reserved", "writing", "in_use", "quarantined"):
        assert held([ledger(free=6, **{state: 4})])
    assert held([Ledger(node="decode-0", total=10, free=6, quarantined=4)])


# what is asked for beside one plain output


def scorer(tokens: Sequence[int], top: int) -> list[TokenScore]:
    return [TokenScore(-float(token)) for token in tokens[1:]]


def lines_of(call: Call, *events: Event) -> list[str]:
    made = History().begin(call, now=0.0)
    made.events = [(1.0, event) for event in (Served("a", ("m",)), *events)]
    return complaints([made], reference, scorer=scorer)


TWO = Call(Door.GRPC_STREAM, (10, 20), 3, TIMEOUT, n=2, stop_ids=(31,), logprobs=0, echo=True)
SCORED = (TokenScore(-30.0), TokenScore(-31.0))
PARTS: tuple[Event, ...] = (
    Echoed((10, 20), 0, (TokenScore(-20.0),)),
    Echoed((10, 20), 1, (TokenScore(-20.0),)),
    Tokens((30, 31), 1, SCORED),
    Tokens((30,), 0, SCORED[:1]),
    Tokens((31,), 0, SCORED[1:]),
    Finished("stop", 2, 4),
    Closed(True),
)


def test_choices_that_stop_with_scores_behind_their_prompt_pass() -> None:
    assert lines_of(TWO, *PARTS) == []
    assert lines_of(TWO, *PARTS[:4], GaveUp()) == []
    in_parts = (Echoed((10,), 0), Echoed((20,), 0, (TokenScore(-20.0),)))
    assert lines_of(TWO, *in_parts, *PARTS[1:]) == []
    assert lines_of(TWO, in_parts[0], GaveUp()) == []


@pytest.mark.parametrize(
    ("place", "instead", "complaint"),
    [
        (0, (), "choice 0: 0 tokens of the prompt were given back in 0 parts"),
        (0, (PARTS[0], PARTS[0]), "choice 0: 4 tokens of the prompt were given back in 2 parts"),
        (1, (Echoed((10, 20), 1),), "choice 1: 2 tokens of the prompt were given back in 1 parts, or not as it was"),
        (2, (Tokens((30, 32), 1, SCORED),), "choice 1: token 1 of 2 is wrong"),
        (2, (Tokens((30, 31), 2, SCORED),), "choices [2] were not asked for"),
        (2, (Tokens((30, 31), 1, SCORED[:1]),), "choice 1: the scores of 2 tokens are wrong: 1"),
        (3, (Tokens((30,), 0, SCORED[1:]),), "choice 0: the scores of 2 tokens are wrong"),
        (4, (), "choice 0: finished (stop) with 1 of 2 tokens"),
        (5, (Finished("stop", 2, 2),), "usage says (2, 2), not (2, 4)"),
    ],
    ids=str,
)
def test_every_breach_of_what_was_asked_is_seen(place: int, instead: tuple[Event, ...], complaint: str) -> None:
    lines = lines_of(TWO, *PARTS[:place], *instead, *PARTS[place + 1 :])
    assert any(complaint in line for line in lines), lines
