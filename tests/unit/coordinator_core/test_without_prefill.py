"""Mode disaggregated while no prefill node can be given work: decode nodes compute the prompts, whoever waits goes on
at once, and hand-offs resume with the first prefill node."""

from collections.abc import Callable

import pytest

from baton.ratio import Split
from baton.types import Incarnation, NodeName, RequestId
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import DECODE, PREFILL, STALL, World

P0 = NodeName("p0")


def way(world: World, request: RequestId) -> tuple[str, str]:
    told = world.brain.explain(request, world.now).attempts[-1]
    return told.way, told.why


def dies(world: World, prefill: Incarnation) -> None:
    world.gone(prefill)


def is_drained(world: World, prefill: Incarnation) -> None:
    world.effects += world.brain.drain_node(P0, None, world.now)


def leaves(world: World, prefill: Incarnation) -> None:
    world.say(prefill, m.Leaving("stopping"))


def stands_still(world: World, prefill: Incarnation) -> None:
    world.beat(prefill, progress_age_seconds=STALL + 1)


@pytest.mark.parametrize("event", [dies, is_drained, leaves, stands_still])
def test_who_waits_for_the_last_prefill_node_goes_on_without_it(
    event: Callable[[World, Incarnation], None],
) -> None:
    world = World(prefill_share=0.25)
    prefill, decode = world.join("p0", PREFILL), world.join("d0", DECODE, max_num_seqs=8)
    requests = [world.submit(prompt=100) for _ in range(4)]
    assert world.brain.state(requests[3]) is RequestState.QUEUED, "the window of the prefill node is full"
    event(world, prefill)
    alone = [order for order in world.sent(decode, m.Submit) if order.writer is None]
    assert alone, "at least one of them has gone on"
    assert {order.prefill_share for order in alone} == {0.25}, "what runs there keeps its pace"
    assert {way(world, order.work.key.request) for order in alone} == {("local", "no_prefill_node")}
    assert world.brain.counters.placements["local", "no_prefill_node"] >= 1
    assert world.brain.local_prefill_only
    assert world.brain.missing() == ""
    assert [world.ends(request) for request in requests] == [[]] * 4
    again = world.join("p2", PREFILL)
    world.submit()
    handed_off = world.sent(again, m.Prefill)
    assert {way(world, order.work.key.request) for order in handed_off} == {("hand_off", "mode")}
    assert not world.brain.local_prefill_only


def test_decode_nodes_that_joined_first_serve_at_once() -> None:
    world = World()
    world.join("d0", DECODE)
    request = world.submit(max_tokens=1)
    assert way(world, request) == ("local", "no_prefill_node")
    assert world.brain.missing_prefill() == "there is no prefill node"


def test_with_neither_role_the_decode_node_is_what_lacks() -> None:
    world = World()
    world.gone(world.join("d0", DECODE))
    assert (world.brain.missing(), world.brain.missing_prefill()) == ("there is no decode node", "")
    assert not world.brain.local_prefill_only, "nobody computes anything"


def test_colocated_misses_no_prefill_node() -> None:
    world = World("colocated")
    world.join("d0", DECODE)
    assert (world.brain.missing_prefill(), world.brain.local_prefill_only) == ("", False)


@pytest.mark.parametrize("mode", ["disaggregated", "auto"])
def test_what_no_prefill_node_can_hold_is_computed_on_decode(mode: str) -> None:
    """A prefill node that is too small is no worse than none, for those that wait and for those that come."""
    world = World(mode, prefill_share=0.25)
    large, decode = world.join("p0", PREFILL), world.join("d0", DECODE, max_num_seqs=8)
    small = world.join("p1", PREFILL, max_model_len=64)
    begun = world.submit(prompt=100, max_tokens=5)
    world.gone(large)
    fresh = world.submit(prompt=100, max_tokens=5)
    orders = [order for order in world.sent(decode, m.Submit) if order.writer is None]
    assert [order.work.key.request for order in orders] == [begun, fresh]
    assert way(world, fresh) == ("local", "prefill_too_small")
    assert {order.prefill_share for order in orders} == {0.25}, "what runs there keeps its pace"
    assert not world.sent(small, m.Prefill)
    short = world.submit(prompt=20)
    if mode == "disaggregated":
        assert way(world, begun) == ("local", "prefill_too_small")
        assert way(world, short) == ("hand_off", "mode")
        assert [order.prefill_share for order in world.sent(decode, m.Submit) if order.writer is not None][-1] == 0


def test_a_small_prefill_node_does_not_bound_what_clients_may_ask() -> None:
    world = World()
    world.join("p0", PREFILL, max_model_len=64)
    world.join("d0", DECODE)
    assert way(world, world.submit(prompt=100, max_tokens=5)) == ("local", "prefill_too_small")


def test_one_token_that_no_decode_node_can_hold_is_answered_by_prefill() -> None:
    world = World()
    decode, prefill = world.join("d0", DECODE), world.join("p0", PREFILL)
    world.join("d1", DECODE, num_blocks=4)
    world.gone(decode)
    request = world.submit(prompt=100, max_tokens=1)
    assert world.key(prefill) == (request, 1, 0)


def test_the_probe_of_the_only_prefill_node_goes_through_it() -> None:
    """It is out of service until the probe has ended well; others are computed on decode meanwhile."""
    world = World()
    for name in ("d0", "d1", "d2"):
        world.join(name, DECODE)
    world.effects += world.brain.set_ratio(Split(1, 2), 60.0, world.now)
    sent = [effect for effect in world.effects if isinstance(effect, m.Send)]
    (order,) = [effect for effect in sent if isinstance(effect.message, m.SetRole)]
    name = world.brain.registry.nodes[order.node].info.name
    world.gone(order.node)
    prefill = world.join(name, PREFILL)
    (probe,) = world.sent(prefill, m.Prefill)
    assert probe.work.key.request.startswith("probe-")
    request = world.submit()
    assert way(world, request) == ("local", "no_prefill_node")
