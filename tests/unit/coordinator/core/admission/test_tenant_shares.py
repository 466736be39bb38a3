"""Who has had more than its share, and what others had meanwhile."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import RequestId
from coordinator.core.admission.tenants import TenantShares
from coordinator.core.admission.waiting_queue import MAX_BYPASS, QueueEntry, WaitingQueue
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.estimates.workload import WINDOW_SECONDS


def charge(
    made: TenantShares, tenant: str, weight: float, cost: float, now: float, turns: int = 1
) -> None:
    """And look, so that it is of that moment."""
    made.charge_tenant(tenant, weight, cost, now, placements=turns)
    made.headroom_share(tenant, 1.0, now)


def headroom_of(made: TenantShares, tenant: str, most: float, now: float) -> float:
    """The headroom of a tenant at a moment at which it asks for more than everybody else
    together."""
    flooded = copy.deepcopy(made)
    flooded.record_arrivals(tenant, 10**6, now)
    return flooded.headroom_share(tenant, most, now)


def shares(**costs: float) -> TenantShares:
    """Each tenant has had ten requests."""
    made = TenantShares()
    for tenant, cost in costs.items():
        made.charge_tenant(tenant, 1.0, cost, 1.0, placements=10)
    made.headroom_share("", 1.0, 1.0)
    return made


def test_tenant_above_its_share_leaves_headroom() -> None:
    made = shares(a=20.0, b=20.0, greedy=60.0)
    assert headroom_of(made, "greedy", 1.0, 1.0) == pytest.approx(0.4)
    assert headroom_of(made, "a", 1.0, 1.0) == headroom_of(made, "b", 1.0, 1.0) == 0.0


def test_rejected_requests_count_as_demand() -> None:
    made = shares(a=30.0, b=30.0, greedy=40.0)
    assert headroom_of(made, "greedy", 1.0, 1.0) == 0.0
    made.record_rejections("greedy", 20, 1.0)  # each of them 4
    assert headroom_of(made, "greedy", 1.0, 1.0) == pytest.approx(0.8 * 0.6), (
        "it has had 1.2 times its share"
    )
    assert headroom_of(made, "greedy", 0.1, 1.0) == pytest.approx(0.8 * 0.1)
    for tenant in "ab":
        made.record_rejections(tenant, 20, 1.0)
    assert headroom_of(made, "greedy", 1.0, 1.0) == 0.0, "everybody does"


def test_tenant_below_its_share_leaves_no_headroom() -> None:
    made = shares(a=35.0, b=35.0, greedy=30.0)
    made.record_rejections("greedy", 1000, 1.0)
    assert headroom_of(made, "greedy", 1.0, 1.0) == 0.0


def test_rejections_before_first_placement_do_not_count() -> None:
    made = shares(a=50.0)
    made.record_rejections("new", 1000, 1.0)
    assert headroom_of(made, "new", 1.0, 1.0) == headroom_of(made, "a", 1.0, 1.0) == 0.0


def test_single_tenant_leaves_no_headroom() -> None:
    assert shares(a=100.0).headroom_share("a", 1.0, 1.0) == 0.0
    assert shares(a=100.0).headroom_share("unknown", 1.0, 1.0) == 0.0


def test_slack_tolerates_small_imbalance() -> None:
    assert headroom_of(shares(a=68.0, b=32.0), "a", 1.0, 1.0) == 0.0
    assert headroom_of(shares(a=72.0, b=28.0), "a", 1.0, 1.0) == pytest.approx(0.28)


def test_shares_follow_weights() -> None:
    made = TenantShares()
    charge(made, "one", 1.0, 0.0, 0.0)
    charge(made, "three", 3.0, 75.0, 0.0)
    charge(made, "one", 1.0, 25.0, 0.0)
    assert headroom_of(made, "three", 1.0, 0.0) == 0.0
    charge(made, "three", 1.0, 0.0, 0.0)  # its weight was changed
    assert headroom_of(made, "three", 1.0, 0.0) == pytest.approx(0.25)


def test_work_served_while_alone_does_not_count() -> None:
    made = TenantShares()
    charge(made, "early", 1.0, 1e6, 0.0, turns=10)
    charge(made, "late", 1.0, 10.0, 1.0)
    assert headroom_of(made, "early", 1.0, 1.0) == 0.0
    charge(made, "early", 1.0, 30.0, 1.0)
    assert headroom_of(made, "early", 1.0, 1.0) == pytest.approx(0.25)


def test_old_work_decays_and_expires() -> None:
    made = shares(early=100.0, late=0.0)
    charge(made, "late", 1.0, 100.0, 1.0 + WINDOW_SECONDS)
    assert headroom_of(made, "late", 1.0, 1.0 + WINDOW_SECONDS) > 0.2
    assert headroom_of(made, "late", 1.0, 1.01 + WINDOW_SECONDS) == 0.0, (
        "nobody else has been here lately"
    )
    assert headroom_of(made, "early", 1.0, 1.01 + WINDOW_SECONDS) == 0.0


def test_late_settled_charges_are_decayed() -> None:
    made = TenantShares()
    made.charge_tenant("early", 1.0, 1000.0, 0.0)
    made.charge_tenant("late", 1.0, 300.0, 25.0)
    assert headroom_of(made, "early", 1.0, 25.0) == 0.0, "1000 of 25 s ago are 435"


def test_unsettled_charges_count_from_charge_time() -> None:
    """Tokens are made long after the last request has come, and then nobody comes for long."""
    made = shares(greedy=100.0, meek=10.0)
    for second in (10.0, 20.0):
        made.charge_tenant("greedy", 1.0, 1000.0, second)
        made.charge_tenant("meek", 1.0, 100.0, second)
    for tenant in ("greedy", "meek"):
        made.headroom_share(tenant, 1.0, 1020.0)
        made.charge_tenant(tenant, 1.0, 10.0, 1020.0)
    assert headroom_of(made, "greedy", 1.0, 1020.0) == 0.0


def test_end_of_flood_is_detected_within_seconds() -> None:
    """What it has had and asked for in the last half minute would tell against it for as long."""
    made = shares(a=20.0, b=20.0, greedy=60.0)
    made.record_rejections("greedy", 100, 1.0)
    assert made.headroom_share("greedy", 1.0, 1.0) == pytest.approx(0.4)
    for tenths in range(
        100
    ):  # from now on all ask for as much, and what has piled up is served beside it
        now = 1.0 + tenths / 10
        for tenant, cost in (("a", 2.0), ("b", 2.0), ("greedy", 6.0)):
            made.charge_tenant(tenant, 1.0, cost, now, placements=1)
            made.record_arrivals(tenant, 3 if tenant != "greedy" else 1, now)
        if made.headroom_share("greedy", 1.0, now) == 0.0:
            break
    assert now <= 8.0
    assert headroom_of(made, "greedy", 1.0, now) > 0.3, (
        "its line is still served, as long as it asks for no more"
    )


def test_short_burst_is_not_a_flood() -> None:
    made = shares(a=34.0, b=33.0, c=33.0)
    made.record_arrivals("a", 1000, 1.0)
    assert made.headroom_share("a", 1.0, 1.0) == 0.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from([0.5, 1.0, 4.0]),
            st.floats(0, 1e4),
            st.floats(0, 4000),
        ),
        max_size=60,
    )
)
def test_running_sums_match_recomputed_sums(charges: list[tuple[str, float, float, float]]) -> None:
    """Against everything added up anew, over times that make the scale be chosen anew as well."""
    made, now, known = TenantShares(), 0.0, list[tuple[str, float, float]]()
    weights, last = dict[str, float](), dict[str, float]()
    for tenant, weight, cost, passed in charges:
        now += passed
        for gone in [each for each in last if now - last[each] > WINDOW_SECONDS]:
            known = [charge for charge in known if charge[0] != gone]
            del weights[gone], last[gone]
        if len(weights) == 1 and tenant not in weights:
            known = []
        charge(made, tenant, weight, cost, now)
        known.append((tenant, cost, now))
        weights[tenant], last[tenant] = weight, now
        had = {
            each: sum(
                cost * math.exp((then - now) / WINDOW_SECONDS)
                for who, cost, then in known
                if who == each
            )
            for each in weights
        }
        total = sum(had.values())
        for each in weights:
            share = 1.4 * weights[each] / sum(weights.values())
            if total > 1e-3 and abs(had[each] / total - share) > 1e-6:
                over = had[each] / total > share and len(weights) > 1
                assert headroom_of(made, each, 1.0, now) == pytest.approx(
                    1 - had[each] / total if over else 0.0, abs=1e-6
                )


def waiting(*tenants: str) -> WaitingQueue:
    """One of each waits, and the last one has been given ten times as much as the others."""
    queue = WaitingQueue()
    for tokens, names in ((0, tenants), (10, tenants[:-1]), (100, tenants[-1:])):
        for tenant in names:
            had = RequestId(f"{tokens} of {tenant}")
            queue.add_request(had, QueueEntry(tenant, prompt_tokens=tokens))
            queue.take_request(had, 0.0)
    for tenant in tenants:
        queue.add_request(RequestId(tenant), QueueEntry(tenant))
    return queue


def test_headroom_applies_to_first_placement_only() -> None:
    queue, greedy = waiting("meek", "greedy"), RequestId("greedy")
    assert queue.headroom_share(greedy, 1.0, 0.0) == pytest.approx(10 / 110)
    assert queue.headroom_share(RequestId("meek"), 1.0, 0.0) == 0.0
    queue.take_request(greedy, 0.0)
    queue.add_request_front(greedy)
    assert queue.headroom_share(greedy, 1.0, 0.0) == 0.0, "it is placed again"


def test_request_at_max_bypass_leaves_no_headroom() -> None:
    queue, greedy = waiting("meek", "greedy"), RequestId("greedy")
    for number in range(MAX_BYPASS):
        assert queue.headroom_share(greedy, 1.0, 0.0) > 0.0
        small = RequestId(f"small {number}")
        queue.add_request(small, QueueEntry("greedy", due_at=1.0))
        queue.take_request(small, 0.0)
    assert queue.headroom_share(greedy, 1.0, 0.0) == 0.0


def test_internal_requests_are_not_a_tenant() -> None:
    queue = waiting(INTERNAL_CLASS, "only")
    assert queue.headroom_share(RequestId("only"), 1.0, 0.0) == 0.0
