"""The order of one class, and of the queue: between tenants, within one, and who yields to whom."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.types import FinishReason, RequestId, Standing
from coordinator.core import messages as m
from coordinator.core.fair_order import CREDIT, Claim, FairOrder
from coordinator.core.queue import WaitingQueue, due
from coordinator.core.tenants import Tenant, Tenants
from tests.unit.coordinator_core.world import DECODE, World


def name(number: int) -> RequestId:
    return RequestId(f"r{number}")


def two_lines(length: int) -> FairOrder:
    """Of equal requests: r0, r1, ... are of the tenant `yields`, r100, r101, ... of the tenant `comes`."""
    order = FairOrder()
    for number in range(length):
        order.push(name(number), Claim("yields", tokens=10))
        order.push(name(100 + number), Claim("comes", tokens=10))
    return order


@settings(max_examples=50)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 100), min_size=4, max_size=12),
)
def test_shares_converge_to_weights(weights: list[float], sizes: list[int]) -> None:
    order, claims, served, serial = FairOrder(), dict[RequestId, Claim](), Counter[str](), 0

    def more(tenant: int) -> None:
        nonlocal serial
        serial += 1
        claim = Claim(f"t{tenant}", 1, weights[tenant], sizes[serial % len(sizes)])
        claims[name(serial)] = claim
        order.push(name(serial), claim)

    for tenant in range(len(weights)):
        for _ in range(3):
            more(tenant)
    for _ in range(600):
        request = next(iter(order))
        order.take(request, 0.0)
        served[claims[request].tenant] += claims[request].tokens
        more(int(claims[request].tenant[1:]))
    shares = [served[f"t{tenant}"] / weight for tenant, weight in enumerate(weights)]
    bound = max(sizes) * (1 / min(weights) + 1 / max(weights)) * 2
    assert max(shares) - min(shares) <= bound, "no tenant is ever further ahead than a request"


def test_who_was_idle_saves_up_no_more_than_the_credit() -> None:
    order, tokens = FairOrder(), int(CREDIT) // 4
    for number in range(40):
        order.push(name(number), Claim("busy", tokens=tokens))
    for _ in range(20):
        order.take(next(iter(order)), 0.0)
    for number in range(100, 120):
        order.push(name(number), Claim("late", tokens=tokens))
    turns = []
    for _ in range(14):
        request = next(iter(order))
        order.take(request, 0.0)
        turns.append(int(request[1:]) >= 100)
    assert turns[:4] == [True] * 4, "its credit"
    assert 8 <= turns.count(True) <= 10, "and then turn by turn"


def test_who_leaves_room_saves_nothing_up_by_that() -> None:
    """Neither does it lose what it has: of equals, turns alternate when it leaves no more."""
    order = two_lines(40)
    for number in range(100, 130):
        order.take(name(number), 0.0, ["yields", "unknown"])
    turns = []
    for _ in range(8):
        request = next(iter(order))
        order.take(request, 0.0)
        turns.append(int(request[1:]) >= 100)
    assert turns.count(True) == 4
    assert sorted(turns[:2]) == [False, True]


def test_what_waits_for_another_reason_is_owed() -> None:
    order = two_lines(5)
    for number in range(100, 104):
        order.take(name(number), 0.0)
    assert list(order)[:4] == list(map(name, range(4)))


def test_a_tenant_may_yield_to_another_request_of_its_own() -> None:
    """Of which no headroom is asked: it may not be passed any more."""
    order = FairOrder()
    for number in range(3):
        order.push(name(number), Claim("yields", tokens=10))
    order.take(name(1), 0.0, ["yields"])
    assert list(order) == [name(0), name(2)]


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 1)), min_size=1, max_size=60))
def test_nobody_is_passed_by_who_comes_after_it_was_due(arrivals: list[tuple[int, float]]) -> None:
    queue, now, came = WaitingQueue(), 0.0, dict[RequestId, tuple[float, float]]()
    for number, (tokens, passed) in enumerate(arrivals):
        now += passed
        when = due(tokens / 1e4, now, now + 600.0)
        came[name(number)] = (now, when)
        queue.push(name(number), Claim(tokens=tokens, due=when, arrived=now))
    taken: list[RequestId] = []
    while queue:
        taken.append(queue.candidates()[0])
        queue.take(taken[-1], now)
    for place, first in enumerate(taken):
        for other in taken[place + 1 :]:
            assert came[first][0] <= came[other][1], f"{first} came after {other} was due and went first"


def test_higher_classes_go_first_and_who_is_placed_again_is_first_of_its_class() -> None:
    queue = WaitingQueue()
    for number, level in enumerate((2, 1, 0, 1, 2)):
        queue.push(name(number), Claim(f"t{level}", level))
    queue.take(name(3), 1.0)
    queue.push_front(name(3))
    assert queue.candidates() == [name(2), name(3), name(1), name(0), name(4)]
    assert [queue.waiting(level) for level in range(3)] == [1, 3, 5]


def test_what_is_ahead_counts_others_by_their_weight() -> None:
    order = FairOrder()
    for number in range(10):
        order.push(name(number), Claim("flood", tokens=100))
    assert order.ahead(Claim("late", tokens=100)) == (100.0, 1.0)
    assert order.ahead(Claim("flood", tokens=100)) == (1000.0, 10.0)
    assert order.ahead(Claim("late", weight=0.1, tokens=100)) == (1000.0, 10.0)


# in the brain

TENANTS = Tenants(
    ("premium", "standard", "batch"), {each: Tenant(each, "standard") for each in ("big", "small")}, reserve=0.0
)


def test_who_waits_for_room_is_owed_what_others_have_meanwhile() -> None:
    """Prompts of `big` need more blocks than are free; two of them go before the next of who passed it."""
    world = World(mode="colocated")
    world.brain.reload_tenants(TENANTS, world.now)
    node = world.join("d0", DECODE)
    big, small = (Standing(tenant, "standard", 1) for tenant in ("big", "small"))
    world.beat(node, room=6)
    waiting = [world.submit(prompt=100, max_tokens=1, standing=big) for _ in range(2)]
    for _ in range(6):
        world.submit(prompt=60, max_tokens=1, standing=small)
        world.token(node, world.key(node), 0, finish=FinishReason.LENGTH)
    assert world.placed() == 0
    world.beat(node, room=0)
    world.submit_all(*(world.arrival(prompt=60, max_tokens=1, standing=small) for _ in range(2)))
    world.beat(node, room=32)
    assert [each.work.key.request for each in world.sent(node, m.Submit)[-2:]] == waiting


@pytest.mark.parametrize(("later", "next_ones"), [(0.0, 2), (0.25, 1)])
def test_who_leaves_room_in_one_class_may_be_placed_and_is_owed_in_another(
    monkeypatch: pytest.MonkeyPatch, later: float, next_ones: int
) -> None:
    """As above, and `big` asks for a later class at times. There it is to leave less, or nothing."""
    parts = {("big", 1): 0.9, ("big", 2): later}
    monkeypatch.setattr(
        WaitingQueue, "headroom", lambda queue, request, *_: parts.get(_flow(queue._claims[request]), 0.0)
    )
    world = World(mode="colocated")
    world.brain.reload_tenants(TENANTS, world.now)
    node = world.join("d0", DECODE)
    own, late, small = Standing("big", "standard", 1), Standing("big", "batch", 2), Standing("small", "batch", 2)
    world.submit(prompt=4, standing=small)
    world.token(node, world.key(node), 0)  # the node is not empty
    yields = world.submit(prompt=4, standing=own)
    world.beat(node, room=6)
    waiting = [world.submit(prompt=100, max_tokens=1, standing=late) for _ in range(2)]
    for _ in range(6):
        world.submit(prompt=60, max_tokens=1, standing=small)
        world.token(node, world.key(node), 0, finish=FinishReason.LENGTH)
    world.beat(node, room=0)
    world.submit_all(*(world.arrival(prompt=60, max_tokens=1, standing=small) for _ in range(2)))
    world.beat(node, room=32)
    placed = [each.work.key.request for each in world.sent(node, m.Submit)]
    assert yields not in placed
    assert placed[7 : 7 + next_ones] == waiting[:next_ones]


def _flow(claim: Claim) -> tuple[str, int]:
    return claim.tenant, claim.level
