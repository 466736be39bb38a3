"""Circuit breakers: step by step, against a model under anything, and placement that keeps pairs apart."""

from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.apart import choose_apart
from coordinator.core.breakers import FIRST_REST, LONGEST_REST, TRIP, Breakers, BreakerState, Pair
from coordinator.core.placement import Choice, Demand, NodeView
from coordinator.core.policies import POLICIES
from tests.unit.coordinator_core.test_prefix_aware import DEMAND, D, P, named, outlook

PAIR: Pair = (Incarnation("p0"), Incarnation("d0"))


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    assert [breakers.failed(PAIR, key(n), now) for n in range(TRIP)] == [False] * (TRIP - 1) + [True]
    return breakers


def test_failures_in_a_row_open_it_and_a_commit_between_them_does_not() -> None:
    breakers = Breakers()
    for _ in range(3):
        assert not any(breakers.failed(PAIR, key(n), 0.0) for n in range(TRIP - 1))
        assert not breakers.committed(PAIR, key(9))
    assert breakers.apart == frozenset()
    assert opened().apart == {PAIR}


def test_the_probe_that_commits_closes_it() -> None:
    breakers = opened()
    assert breakers.next() == FIRST_REST
    assert breakers.due(FIRST_REST - 0.01) == []
    assert breakers.due(FIRST_REST) == [PAIR]
    assert (breakers.state(PAIR), breakers.apart, breakers.next()) == (BreakerState.HALF_OPEN, frozenset(), None)
    assert breakers.placed(PAIR, key(1))
    assert breakers.apart == {PAIR}, "one at a time"
    assert not breakers.placed(PAIR, key(2))
    assert not breakers.committed(PAIR, key(2)), "what began before decides nothing"
    assert breakers.committed(PAIR, key(1))
    assert (breakers.state(PAIR), breakers.apart) == (BreakerState.CLOSED, frozenset())


def test_the_probe_that_fails_opens_it_for_longer() -> None:
    breakers, now, rests = opened(), 0.0, []
    for number in range(5):
        due = breakers.next()
        assert due is not None
        rests.append(due - now)
        now = due
        breakers.due(now)
        breakers.placed(PAIR, key(number))
        assert not breakers.failed(PAIR, key(99), now), "only the probe decides"
        assert breakers.failed(PAIR, key(number), now)
    assert rests == [FIRST_REST, 2 * FIRST_REST, *[LONGEST_REST] * 3]


def test_a_probe_without_a_verdict_makes_way_for_another() -> None:
    breakers = opened()
    breakers.due(FIRST_REST)
    breakers.placed(PAIR, key(1))
    assert not breakers.left(PAIR, key(2))
    assert breakers.left(PAIR, key(1))
    assert breakers.placed(PAIR, key(3))


def test_a_node_that_joins_anew_has_a_clean_record() -> None:
    breakers = opened()
    breakers.forget(PAIR[1])
    assert (breakers.state(PAIR), breakers.apart, breakers.next()) == (BreakerState.CLOSED, frozenset(), None)


class BreakersMachine(RuleBasedStateMachine):
    """Attempts begin where placement may let them, and end in any way at any time; nodes come anew."""

    pairs = st.sampled_from([(Incarnation(f"p{p}"), Incarnation(f"d{d}")) for p, d in product(range(2), range(2))])

    def __init__(self) -> None:
        super().__init__()
        self.breakers = Breakers()
        self.now = 0.0
        self.numbers = count()
        self.running: dict[AttemptKey, Pair] = {}
        self.probes: dict[Pair, AttemptKey] = {}
        self.row: dict[Pair, int] = {}  # failures since the last commit
        self.opened: dict[Pair, float] = {}

    @rule(pair=pairs)
    def place(self, pair: Pair) -> None:
        if pair in self.breakers.apart:
            return
        half_open = self.breakers.state(pair) is BreakerState.HALF_OPEN
        attempt = key(next(self.numbers))
        assert self.breakers.placed(pair, attempt) == half_open
        self.running[attempt] = pair
        if half_open:
            assert pair not in self.probes
            self.probes[pair] = attempt

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["failed", "failed", "committed", "left"]))
    def ends(self, data: st.DataObject, end: str) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        pair = self.running.pop(attempt)
        probe = self.probes.get(pair) == attempt
        closed = self.breakers.state(pair) is BreakerState.CLOSED
        if end == "failed":
            self.row[pair] = self.row.get(pair, 0) + 1
            opens = self.breakers.failed(pair, attempt, self.now)
            assert opens == (probe or (closed and self.row[pair] >= TRIP))
            if opens:
                self.opened[pair] = self.now
        elif end == "committed":
            assert self.breakers.committed(pair, attempt) == probe
            if probe or closed:
                self.row.pop(pair, None)
                self.opened.pop(pair, None)
        self.breakers.left(pair, attempt)
        if probe:
            del self.probes[pair]

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for pair in self.breakers.due(self.now):
            assert self.now - self.opened[pair] >= FIRST_REST

    @rule(node=st.sampled_from(["p0", "d1"]))
    def joins_anew(self, node: str) -> None:
        """Its attempts went with it."""
        self.breakers.forget(Incarnation(node))
        self.running = {attempt: pair for attempt, pair in self.running.items() if node not in pair}
        for kept in (self.probes, self.row, self.opened):
            for pair in [pair for pair in kept if node in pair]:
                del kept[pair]  # type: ignore[attr-defined]

    @invariant()
    def kept_apart_for_a_reason_and_not_for_ever(self) -> None:
        apart = self.breakers.apart
        for pair in apart:
            waits = self.breakers.state(pair) is BreakerState.OPEN
            assert waits != (pair in self.probes)
            assert pair in self.opened
            if waits:
                due = self.breakers.next()
                assert due is not None
                assert due <= self.opened[pair] + LONGEST_REST
        for pair, failures in self.row.items():
            assert failures < TRIP or pair in self.opened
        assert {pair for pair in self.opened if self.breakers.state(pair) is BreakerState.CLOSED} == set()


TestBreakersMachine = BreakersMachine.TestCase
TestBreakersMachine.settings = settings(max_examples=60, stateful_step_count=40)


# placement


def apart(*pairs: tuple[str, str]) -> frozenset[Pair]:
    return frozenset((Incarnation(prefill), Incarnation(decode)) for prefill, decode in pairs)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pairs", [mask for mask in range(16)])
def test_every_policy_keeps_apart_what_is_to_be(policy: str, pairs: int) -> None:
    """Over all sets of pairs of two nodes each: someone is found exactly if there is anyone."""
    nodes = [named(P, "p0"), named(P, "p1"), named(D, "d0"), named(D, "d1")]
    everybody = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
    kept = apart(*(pair for place, pair in enumerate(everybody) if pairs >> place & 1))
    choice = choose_apart(POLICIES[policy](), DEMAND, nodes, outlook(), kept)
    assert (choice is None) == (len(kept) == 4)
    if choice is not None:
        assert (choice.prefill, choice.decode) not in kept
        assert choice.prefill is not None
        assert choice.decode is not None


def test_a_writer_without_room_reaches_nobody() -> None:
    full: NodeView = named(P, "full", computing=64)
    nodes = [full, named(P, "p0"), named(D, "d0"), named(D, "d1", last_placed=9)]
    choice = choose_apart(POLICIES["prefix_aware"](), DEMAND, nodes, outlook(), apart(("p0", "d0")))
    assert choice == Choice(Incarnation("p0"), Incarnation("d1"))


@pytest.mark.parametrize("change", [{"prefill": False}, {"decode": False}])
def test_one_leg_alone_minds_no_pair(change: dict[str, bool]) -> None:
    demand: Demand = replace(DEMAND, **change)  # type: ignore[arg-type]
    nodes = [named(P, "p0"), named(D, "d0")]
    assert choose_apart(POLICIES["prefix_aware"](), demand, nodes, outlook(), apart(("p0", "d0"))) is not None


def test_who_holds_the_prompt_needs_no_writer() -> None:
    demand = replace(DEMAND, holder=Incarnation("d0"))
    nodes = [named(P, "p0"), named(D, "d0")]
    choice = choose_apart(POLICIES["prefix_aware"](), demand, nodes, outlook(), apart(("p0", "d0")))
    assert choice == Choice(None, Incarnation("d0"))
