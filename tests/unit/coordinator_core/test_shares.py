"""Who has had more than its share, and what others had meanwhile."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import RequestId
from coordinator.core.counters import INTERNAL
from coordinator.core.fair_order import Claim
from coordinator.core.queue import MAX_BYPASS, WaitingQueue
from coordinator.core.recent_work import WINDOW
from coordinator.core.shares import Shares


def charge(made: Shares, tenant: str, weight: float, cost: float, now: float, turns: int = 1) -> None:
    """And look, so that it is of that moment."""
    made.charge(tenant, weight, cost, now, turns=turns)
    made.headroom(tenant, 1.0, now)


def leaves(made: Shares, tenant: str, most: float, now: float) -> float:
    """The headroom of a tenant at a moment at which it asks for more than everybody else together."""
    flooded = copy.deepcopy(made)
    flooded.asked(tenant, 10**6, now)
    return flooded.headroom(tenant, most, now)


def shares(**costs: float) -> Shares:
    """Each tenant has had ten requests."""
    made = Shares()
    for tenant, cost in costs.items():
        made.charge(tenant, 1.0, cost, 1.0, turns=10)
    made.headroom("", 1.0, 1.0)
    return made


def test_who_has_had_more_than_its_share() -> None:
    made = shares(a=20.0, b=20.0, greedy=60.0)
    assert leaves(made, "greedy", 1.0, 1.0) == pytest.approx(0.4)
    assert leaves(made, "a", 1.0, 1.0) == leaves(made, "b", 1.0, 1.0) == 0.0


def test_who_asks_for_more_than_its_share() -> None:
    made = shares(a=30.0, b=30.0, greedy=40.0)
    assert leaves(made, "greedy", 1.0, 1.0) == 0.0
    made.refused("greedy", 20, 1.0)  # each of them 4
    assert leaves(made, "greedy", 1.0, 1.0) == pytest.approx(0.8 * 0.6), "it has had 1.2 times its share"
    assert leaves(made, "greedy", 0.1, 1.0) == pytest.approx(0.8 * 0.1)
    for tenant in "ab":
        made.refused(tenant, 20, 1.0)
    assert leaves(made, "greedy", 1.0, 1.0) == 0.0, "everybody does"


def test_who_asks_for_more_and_has_not_had_its_share_leaves_nothing() -> None:
    made = shares(a=35.0, b=35.0, greedy=30.0)
    made.refused("greedy", 1000, 1.0)
    assert leaves(made, "greedy", 1.0, 1.0) == 0.0


def test_what_was_refused_before_anything_was_had_is_no_measure() -> None:
    made = shares(a=50.0)
    made.refused("new", 1000, 1.0)
    assert leaves(made, "new", 1.0, 1.0) == leaves(made, "a", 1.0, 1.0) == 0.0


def test_alone_everything_is_ones_share() -> None:
    assert shares(a=100.0).headroom("a", 1.0, 1.0) == 0.0
    assert shares(a=100.0).headroom("unknown", 1.0, 1.0) == 0.0


def test_equals_differ_a_little() -> None:
    assert leaves(shares(a=68.0, b=32.0), "a", 1.0, 1.0) == 0.0
    assert leaves(shares(a=72.0, b=28.0), "a", 1.0, 1.0) == pytest.approx(0.28)


def test_a_share_follows_from_weights() -> None:
    made = Shares()
    charge(made, "one", 1.0, 0.0, 0.0)
    charge(made, "three", 3.0, 75.0, 0.0)
    charge(made, "one", 1.0, 25.0, 0.0)
    assert leaves(made, "three", 1.0, 0.0) == 0.0
    charge(made, "three", 1.0, 0.0, 0.0)  # its weight was changed
    assert leaves(made, "three", 1.0, 0.0) == pytest.approx(0.25)


def test_what_one_had_alone_was_nobodys_loss() -> None:
    made = Shares()
    charge(made, "early", 1.0, 1e6, 0.0, turns=10)
    charge(made, "late", 1.0, 10.0, 1.0)
    assert leaves(made, "early", 1.0, 1.0) == 0.0
    charge(made, "early", 1.0, 30.0, 1.0)
    assert leaves(made, "early", 1.0, 1.0) == pytest.approx(0.25)


def test_what_was_long_ago_counts_less_and_then_not_at_all() -> None:
    made = shares(early=100.0, late=0.0)
    charge(made, "late", 1.0, 100.0, 1.0 + WINDOW)
    assert leaves(made, "late", 1.0, 1.0 + WINDOW) > 0.2
    assert leaves(made, "late", 1.0, 1.01 + WINDOW) == 0.0, "nobody else has been here lately"
    assert leaves(made, "early", 1.0, 1.01 + WINDOW) == 0.0


def test_what_is_booked_late_has_faded_meanwhile() -> None:
    made = Shares()
    made.charge("early", 1.0, 1000.0, 0.0)
    made.charge("late", 1.0, 300.0, 25.0)
    assert leaves(made, "early", 1.0, 25.0) == 0.0, "1000 of 25 s ago are 435"


def test_what_was_charged_while_nobody_looked_counts_from_then() -> None:
    """Tokens are made long after the last request has come, and then nobody comes for long."""
    made = shares(greedy=100.0, meek=10.0)
    for second in (10.0, 20.0):
        made.charge("greedy", 1.0, 1000.0, second)
        made.charge("meek", 1.0, 100.0, second)
    for tenant in ("greedy", "meek"):
        made.headroom(tenant, 1.0, 1020.0)
        made.charge(tenant, 1.0, 10.0, 1020.0)
    assert leaves(made, "greedy", 1.0, 1020.0) == 0.0


def test_a_flood_that_is_over_is_found_out_within_seconds() -> None:
    """What it has had and asked for in the last half minute would tell against it for as long."""
    made = shares(a=20.0, b=20.0, greedy=60.0)
    made.refused("greedy", 100, 1.0)
    assert made.headroom("greedy", 1.0, 1.0) == pytest.approx(0.4)
    for tenths in range(100):  # from now on all ask for as much, and what has piled up is served beside it
        now = 1.0 + tenths / 10
        for tenant, cost in (("a", 2.0), ("b", 2.0), ("greedy", 6.0)):
            made.charge(tenant, 1.0, cost, now, turns=1)
            made.asked(tenant, 3 if tenant != "greedy" else 1, now)
        if made.headroom("greedy", 1.0, now) == 0.0:
            break
    assert now <= 8.0
    assert leaves(made, "greedy", 1.0, now) > 0.3, "its line is still served, as long as it asks for no more"


def test_a_burst_of_seconds_is_no_flood() -> None:
    made = shares(a=34.0, b=33.0, c=33.0)
    made.asked("a", 1000, 1.0)
    assert made.headroom("a", 1.0, 1.0) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 4.0]), st.floats(0, 1e4), st.floats(0, 4000)),
        max_size=60,
    )
)
def test_the_running_sums_are_the_sums(charges: list[tuple[str, float, float, float]]) -> None:
    """Against everything added up anew, over times that make the scale be chosen anew as well."""
    made, now, known = Shares(), 0.0, list[tuple[str, float, float]]()
    weights, last = dict[str, float](), dict[str, float]()
    for tenant, weight, cost, passed in charges:
        now += passed
        for gone in [each for each in last if now - last[each] > WINDOW]:
            known = [charge for charge in known if charge[0] != gone]
            del weights[gone], last[gone]
        if len(weights) == 1 and tenant not in weights:
            known = []
        charge(made, tenant, weight, cost, now)
        known.append((tenant, cost, now))
        weights[tenant], last[tenant] = weight, now
        had = {
            each: sum(cost * math.exp((then - now) / WINDOW) for who, cost, then in known if who == each)
            for each in weights
        }
        total = sum(had.values())
        for each in weights:
            share = 1.4 * weights[each] / sum(weights.values())
            if total > 1e-3 and abs(had[each] / total - share) > 1e-6:
                over = had[each] / total > share and len(weights) > 1
                assert leaves(made, each, 1.0, now) == pytest.approx(1 - had[each] / total if over else 0.0, abs=1e-6)


def waiting(*tenants: str) -> WaitingQueue:
    """One of each waits, and the last one has been given ten times as much as the others."""
    queue = WaitingQueue()
    for tokens, names in ((0, tenants), (10, tenants[:-1]), (100, tenants[-1:])):
        for tenant in names:
            had = RequestId(f"{tokens} of {tenant}")
            queue.push(had, Claim(tenant, tokens=tokens))
            queue.take(had, 0.0)
    for tenant in tenants:
        queue.push(RequestId(tenant), Claim(tenant))
    return queue


def test_the_queue_asks_it_of_who_waits_for_a_first_placement() -> None:
    queue, greedy = waiting("meek", "greedy"), RequestId("greedy")
    assert queue.headroom(greedy, 1.0, 0.0) == pytest.approx(10 / 110)
    assert queue.headroom(RequestId("meek"), 1.0, 0.0) == 0.0
    queue.take(greedy, 0.0)
    queue.push_front(greedy)
    assert queue.headroom(greedy, 1.0, 0.0) == 0.0, "it is placed again"


def test_who_may_not_be_passed_any_more_leaves_nothing() -> None:
    queue, greedy = waiting("meek", "greedy"), RequestId("greedy")
    for number in range(MAX_BYPASS):
        assert queue.headroom(greedy, 1.0, 0.0) > 0.0
        small = RequestId(f"small {number}")
        queue.push(small, Claim("greedy", due=1.0))
        queue.take(small, 0.0)
    assert queue.headroom(greedy, 1.0, 0.0) == 0.0


def test_the_clusters_own_requests_are_nobody() -> None:
    queue = waiting(INTERNAL, "only")
    assert queue.headroom(RequestId("only"), 1.0, 0.0) == 0.0
