"""Circuit breakers: step by step, against a model under anything, and placement that keeps pairs
apart."""

from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.common.breaker_state import BreakerState
from coordinator.core.placement.breakers import (
    FAILURES_TO_OPEN,
    FIRST_COOLDOWN_SECONDS,
    MAX_COOLDOWN_SECONDS,
    CircuitBreakers,
    NodePair,
)
from coordinator.core.placement.interface import NodeChoice
from coordinator.core.placement.node_loads import NodeView, PlacementDemand
from coordinator.core.placement.policies import POLICIES, choose_excluding_open_breakers
from tests.unit.coordinator.core.placement.sample_nodes import (
    DEMAND,
    D,
    P,
    named_view,
    placement_context,
)

PAIR: NodePair = (Incarnation("p0"), Incarnation("d0"))


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


def make_open_breakers(now: float = 0.0) -> CircuitBreakers:
    breakers = CircuitBreakers()
    assert [breakers.record_failure(PAIR, key(n), now) for n in range(FAILURES_TO_OPEN)] == [
        False
    ] * (FAILURES_TO_OPEN - 1) + [True]
    return breakers


def test_consecutive_failures_open_breaker_and_commit_resets_count() -> None:
    breakers = CircuitBreakers()
    for _ in range(3):
        assert not any(
            breakers.record_failure(PAIR, key(n), 0.0) for n in range(FAILURES_TO_OPEN - 1)
        )
        assert not breakers.record_commit(PAIR, key(9))
    assert breakers.blocked_pairs == frozenset()
    assert make_open_breakers().blocked_pairs == {PAIR}


def test_committed_probe_closes_breaker() -> None:
    breakers = make_open_breakers()
    assert breakers.next_half_open_at() == FIRST_COOLDOWN_SECONDS
    assert breakers.half_open_due_pairs(FIRST_COOLDOWN_SECONDS - 0.01) == []
    assert breakers.half_open_due_pairs(FIRST_COOLDOWN_SECONDS) == [PAIR]
    assert (breakers.get_state(PAIR), breakers.blocked_pairs, breakers.next_half_open_at()) == (
        BreakerState.HALF_OPEN,
        frozenset(),
        None,
    )
    assert breakers.try_start_probe(PAIR, key(1))
    assert breakers.blocked_pairs == {PAIR}, "one at a time"
    assert not breakers.try_start_probe(PAIR, key(2))
    assert not breakers.record_commit(PAIR, key(2)), "what began before decides nothing"
    assert breakers.record_commit(PAIR, key(1))
    assert (breakers.get_state(PAIR), breakers.blocked_pairs) == (BreakerState.CLOSED, frozenset())


def test_failed_probe_reopens_breaker_for_longer() -> None:
    breakers, now, rests = make_open_breakers(), 0.0, []
    for number in range(5):
        due = breakers.next_half_open_at()
        assert due is not None
        rests.append(due - now)
        now = due
        breakers.half_open_due_pairs(now)
        breakers.try_start_probe(PAIR, key(number))
        assert not breakers.record_failure(PAIR, key(99), now), "only the probe decides"
        assert breakers.record_failure(PAIR, key(number), now)
    assert rests == [
        FIRST_COOLDOWN_SECONDS,
        2 * FIRST_COOLDOWN_SECONDS,
        *[MAX_COOLDOWN_SECONDS] * 3,
    ]


def test_inconclusive_probe_lets_another_through() -> None:
    breakers = make_open_breakers()
    breakers.half_open_due_pairs(FIRST_COOLDOWN_SECONDS)
    breakers.try_start_probe(PAIR, key(1))
    assert not breakers.abandon_probe(PAIR, key(2))
    assert breakers.abandon_probe(PAIR, key(1))
    assert breakers.try_start_probe(PAIR, key(3))


def test_rejoined_node_has_closed_breakers() -> None:
    breakers = make_open_breakers()
    breakers.forget_node(PAIR[1])
    assert (breakers.get_state(PAIR), breakers.blocked_pairs, breakers.next_half_open_at()) == (
        BreakerState.CLOSED,
        frozenset(),
        None,
    )


class BreakersMachine(RuleBasedStateMachine):
    """Attempts begin where placement may let them, and end in any way at any time; nodes come
    anew."""

    pairs = st.sampled_from(
        [(Incarnation(f"p{p}"), Incarnation(f"d{d}")) for p, d in product(range(2), range(2))]
    )

    def __init__(self) -> None:
        super().__init__()
        self.breakers = CircuitBreakers()
        self.now = 0.0
        self.numbers = count()
        self.running: dict[AttemptKey, NodePair] = {}
        self.probes: dict[NodePair, AttemptKey] = {}
        self.row: dict[NodePair, int] = {}  # failures since the last commit
        self.opened: dict[NodePair, float] = {}

    @rule(pair=pairs)
    def place(self, pair: NodePair) -> None:
        if pair in self.breakers.blocked_pairs:
            return
        half_open = self.breakers.get_state(pair) is BreakerState.HALF_OPEN
        attempt = key(next(self.numbers))
        assert self.breakers.try_start_probe(pair, attempt) == half_open
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
        closed = self.breakers.get_state(pair) is BreakerState.CLOSED
        if end == "failed":
            self.row[pair] = self.row.get(pair, 0) + 1
            opens = self.breakers.record_failure(pair, attempt, self.now)
            assert opens == (probe or (closed and self.row[pair] >= FAILURES_TO_OPEN))
            if opens:
                self.opened[pair] = self.now
        elif end == "committed":
            assert self.breakers.record_commit(pair, attempt) == probe
            if probe or closed:
                self.row.pop(pair, None)
                self.opened.pop(pair, None)
        self.breakers.abandon_probe(pair, attempt)
        if probe:
            del self.probes[pair]

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for pair in self.breakers.half_open_due_pairs(self.now):
            assert self.now - self.opened[pair] >= FIRST_COOLDOWN_SECONDS

    @rule(node=st.sampled_from(["p0", "d1"]))
    def joins_anew(self, node: str) -> None:
        """Its attempts went with it."""
        self.breakers.forget_node(Incarnation(node))
        self.running = {attempt: pair for attempt, pair in self.running.items() if node not in pair}
        for kept in (self.probes, self.row, self.opened):
            for pair in [pair for pair in kept if node in pair]:
                del kept[pair]

    @invariant()
    def kept_apart_for_a_reason_and_not_for_ever(self) -> None:
        apart = self.breakers.blocked_pairs
        for pair in apart:
            waits = self.breakers.get_state(pair) is BreakerState.OPEN
            assert waits != (pair in self.probes)
            assert pair in self.opened
            if waits:
                due = self.breakers.next_half_open_at()
                assert due is not None
                assert due <= self.opened[pair] + MAX_COOLDOWN_SECONDS
        for pair, failures in self.row.items():
            assert failures < FAILURES_TO_OPEN or pair in self.opened
        assert {
            pair for pair in self.opened if self.breakers.get_state(pair) is BreakerState.CLOSED
        } == set()


TestBreakersMachine = BreakersMachine.TestCase
TestBreakersMachine.settings = settings(max_examples=60, stateful_step_count=40)


# placement


def blocked_pairs(*pairs: tuple[str, str]) -> frozenset[NodePair]:
    return frozenset((Incarnation(prefill), Incarnation(decode)) for prefill, decode in pairs)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pairs", [mask for mask in range(16)])
def test_every_policy_excludes_blocked_pairs(policy: str, pairs: int) -> None:
    """Over all sets of pairs of two nodes each: someone is found exactly if there is anyone."""
    nodes = [named_view(P, "p0"), named_view(P, "p1"), named_view(D, "d0"), named_view(D, "d1")]
    everybody = [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]
    kept = blocked_pairs(*(pair for place, pair in enumerate(everybody) if pairs >> place & 1))
    choice = choose_excluding_open_breakers(
        POLICIES[policy](), DEMAND, nodes, placement_context(), kept
    )
    assert (choice is None) == (len(kept) == 4)
    if choice is not None:
        assert (choice.prefill, choice.decode) not in kept
        assert choice.prefill is not None
        assert choice.decode is not None


def test_full_prefill_node_is_no_candidate_for_unblocked_pair() -> None:
    full: NodeView = named_view(P, "full", pending_prefills=64)
    nodes = [
        full,
        named_view(P, "p0"),
        named_view(D, "d0"),
        named_view(D, "d1", last_placed_serial=9),
    ]
    choice = choose_excluding_open_breakers(
        POLICIES["prefix_aware"](), DEMAND, nodes, placement_context(), blocked_pairs(("p0", "d0"))
    )
    assert choice == NodeChoice(Incarnation("p0"), Incarnation("d1"))


@pytest.mark.parametrize("change", [{"needs_prefill": False}, {"needs_decode": False}])
def test_single_leg_placement_ignores_blocked_pairs(change: dict[str, bool]) -> None:
    demand: PlacementDemand = replace(DEMAND, **change)  # type: ignore[arg-type]
    nodes = [named_view(P, "p0"), named_view(D, "d0")]
    assert (
        choose_excluding_open_breakers(
            POLICIES["prefix_aware"](),
            demand,
            nodes,
            placement_context(),
            blocked_pairs(("p0", "d0")),
        )
        is not None
    )


def test_prefix_holder_ignores_blocked_pairs() -> None:
    demand = replace(DEMAND, prefix_holder=Incarnation("d0"))
    nodes = [named_view(P, "p0"), named_view(D, "d0")]
    choice = choose_excluding_open_breakers(
        POLICIES["prefix_aware"](), demand, nodes, placement_context(), blocked_pairs(("p0", "d0"))
    )
    assert choice == NodeChoice(None, Incarnation("d0"))
