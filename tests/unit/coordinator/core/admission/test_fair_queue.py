"""The order of the queue: between tenants, within a tenant, and which tenants yield."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster_link.messages import DecodeOrder
from baton.types import FinishReason, Principal, RequestId
from coordinator.core.admission.tenants import Tenant, TenantTable
from coordinator.core.admission.waiting_queue import (
    MAX_CREDIT,
    FairQueue,
    QueueEntry,
    WaitingQueue,
    compute_due_time,
)
from tests.unit.coordinator.core.brain_harness import DECODE, BrainHarness


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


def two_tenant_queue(length: int) -> FairQueue:
    """Return a queue of equal requests: r0, r1, ... of the tenant `yields`, and r100, r101, ...
    of the tenant `comes`."""
    order = FairQueue()
    for number in range(length):
        order.add_request(name(number), QueueEntry("yields", prompt_tokens=10))
        order.add_request(name(100 + number), QueueEntry("comes", prompt_tokens=10))
    return order


@settings(max_examples=50)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 100), min_size=4, max_size=12),
)
def test_shares_converge_to_weights(weights: list[float], sizes: list[int]) -> None:
    order, claims, served, serial = FairQueue(), dict[RequestId, QueueEntry](), Counter[str](), 0

    def more(tenant: int) -> None:
        nonlocal serial
        serial += 1
        claim = QueueEntry(f"t{tenant}", 1, weights[tenant], sizes[serial % len(sizes)])
        claims[name(serial)] = claim
        order.add_request(name(serial), claim)

    for tenant in range(len(weights)):
        for _ in range(3):
            more(tenant)
    for _ in range(600):
        request = next(iter(order))
        order.take_request(request, 0.0)
        served[claims[request].tenant] += claims[request].prompt_tokens
        more(int(claims[request].tenant[1:]))
    shares = [served[f"t{tenant}"] / weight for tenant, weight in enumerate(weights)]
    bound = max(sizes) * (1 / min(weights) + 1 / max(weights)) * 2
    assert max(shares) - min(shares) <= bound, "no tenant is ever further ahead than a request"


def test_idle_tenant_saves_at_most_max_credit() -> None:
    order, tokens = FairQueue(), int(MAX_CREDIT) // 4
    for number in range(40):
        order.add_request(name(number), QueueEntry("busy", prompt_tokens=tokens))
    for _ in range(20):
        order.take_request(next(iter(order)), 0.0)
    for number in range(100, 120):
        order.add_request(name(number), QueueEntry("late", prompt_tokens=tokens))
    turns = []
    for _ in range(14):
        request = next(iter(order))
        order.take_request(request, 0.0)
        turns.append(int(request[1:]) >= 100)
    assert turns[:4] == [True] * 4, "its credit"
    assert 8 <= turns.count(True) <= 10, "and then turn by turn"


def test_yielding_tenant_saves_no_credit() -> None:
    """It loses none either: once it stops yielding, equal tenants alternate."""
    order = two_tenant_queue(40)
    for number in range(100, 130):
        order.take_request(name(number), 0.0, ["yields", "unknown"])
    turns = []
    for _ in range(8):
        request = next(iter(order))
        order.take_request(request, 0.0)
        turns.append(int(request[1:]) >= 100)
    assert turns.count(True) == 4
    assert sorted(turns[:2]) == [False, True]


def test_skipped_tenant_keeps_its_turns() -> None:
    order = two_tenant_queue(5)
    for number in range(100, 104):
        order.take_request(name(number), 0.0)
    assert list(order)[:4] == list(map(name, range(4)))


def test_a_tenant_may_yield_to_another_request_of_its_own() -> None:
    """That request leaves no headroom, because it must not be bypassed any more."""
    order = FairQueue()
    for number in range(3):
        order.add_request(name(number), QueueEntry("yields", prompt_tokens=10))
    order.take_request(name(1), 0.0, ["yields"])
    assert list(order) == [name(0), name(2)]


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 1)), min_size=1, max_size=60))
def test_request_is_never_passed_by_arrival_after_its_due_time(
    arrivals: list[tuple[int, float]],
) -> None:
    queue, now, came = WaitingQueue(), 0.0, dict[RequestId, tuple[float, float]]()
    for number, (tokens, passed) in enumerate(arrivals):
        now += passed
        when = compute_due_time(tokens / 1e4, now, now + 600.0)
        came[name(number)] = (now, when)
        queue.add_request(
            name(number), QueueEntry(prompt_tokens=tokens, due_at=when, arrived_at=now)
        )
    taken: list[RequestId] = []
    while queue:
        taken.append(queue.list_candidates()[0])
        queue.take_request(taken[-1], now)
    for place, first in enumerate(taken):
        for other in taken[place + 1 :]:
            assert came[first][0] <= came[other][1], (
                f"{first} came after {other} was due and went first"
            )


def test_higher_classes_go_first_and_requeued_first_within_class() -> None:
    queue = WaitingQueue()
    for number, level in enumerate((2, 1, 0, 1, 2)):
        queue.add_request(name(number), QueueEntry(f"t{level}", level))
    queue.take_request(name(3), 1.0)
    queue.add_request_front(name(3))
    assert queue.list_candidates() == [name(2), name(3), name(1), name(0), name(4)]
    assert [queue.backlog.count_waiting(level) for level in range(3)] == [1, 3, 5]


def test_backlog_ahead_counts_others_by_weight() -> None:
    order = FairQueue()
    for number in range(10):
        order.add_request(name(number), QueueEntry("flood", prompt_tokens=100))
    assert order.backlog_ahead(QueueEntry("late", prompt_tokens=100)) == (100.0, 1.0)
    assert order.backlog_ahead(QueueEntry("flood", prompt_tokens=100)) == (1000.0, 10.0)
    assert order.backlog_ahead(QueueEntry("late", weight=0.1, prompt_tokens=100)) == (1000.0, 10.0)


# in the brain

TENANTS = TenantTable(
    ("premium", "standard", "batch"),
    {each: Tenant(each, "standard") for each in ("big", "small")},
    reserved_share=0.0,
)


def test_tenant_waiting_for_room_is_compensated() -> None:
    """Prompts of `big` need more blocks than are free. Afterwards two of them are placed before
    the next request of the tenant that passed it."""
    world = BrainHarness(mode="colocated")
    world.brain.reload_tenants(TENANTS, world.now)
    node = world.join_node("d0", DECODE)
    big, small = (Principal(tenant, "standard", 1) for tenant in ("big", "small"))
    world.send_heartbeat(node, room=6)
    waiting = [world.submit(prompt=100, max_tokens=1, standing=big) for _ in range(2)]
    for _ in range(6):
        world.submit(prompt=60, max_tokens=1, standing=small)
        world.report_token(node, world.last_attempt_key(node), 0, finish=FinishReason.LENGTH)
    assert world.count_placed() == 0
    world.send_heartbeat(node, room=0)
    world.submit_all(
        *(world.make_request(prompt=60, max_tokens=1, standing=small) for _ in range(2))
    )
    world.send_heartbeat(node, room=32)
    assert [
        each.work.key.request_id for each in world.messages_to(node, DecodeOrder)[-2:]
    ] == waiting


@pytest.mark.parametrize(("later", "next_ones"), [(0.0, 2), (0.25, 1)])
def test_yielding_in_one_class_does_not_affect_another(
    monkeypatch: pytest.MonkeyPatch, later: float, next_ones: int
) -> None:
    """As above, while `big` at times asks for a later class, where it leaves less headroom or
    none."""
    parts = {("big", 1): 0.9, ("big", 2): later}
    monkeypatch.setattr(
        WaitingQueue,
        "headroom_share",
        lambda queue, request, *_: parts.get(_flow(queue._entries[request]), 0.0),
    )
    world = BrainHarness(mode="colocated")
    world.brain.reload_tenants(TENANTS, world.now)
    node = world.join_node("d0", DECODE)
    own, late, small = (
        Principal("big", "standard", 1),
        Principal("big", "batch", 2),
        Principal("small", "batch", 2),
    )
    world.submit(prompt=4, standing=small)
    world.report_token(node, world.last_attempt_key(node), 0)  # the node is not empty
    yields = world.submit(prompt=4, standing=own)
    world.send_heartbeat(node, room=6)
    waiting = [world.submit(prompt=100, max_tokens=1, standing=late) for _ in range(2)]
    for _ in range(6):
        world.submit(prompt=60, max_tokens=1, standing=small)
        world.report_token(node, world.last_attempt_key(node), 0, finish=FinishReason.LENGTH)
    world.send_heartbeat(node, room=0)
    world.submit_all(
        *(world.make_request(prompt=60, max_tokens=1, standing=small) for _ in range(2))
    )
    world.send_heartbeat(node, room=32)
    placed = [each.work.key.request_id for each in world.messages_to(node, DecodeOrder)]
    assert yields not in placed
    assert placed[7 : 7 + next_ones] == waiting[:next_ones]


def _flow(claim: QueueEntry) -> tuple[str, int]:
    return claim.tenant, claim.priority_level
