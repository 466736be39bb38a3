"""Mode disaggregated without a prefill node in service: decode nodes compute the prompts.

Waiting requests are placed at once, and hand-offs resume with the first prefill node."""

from collections.abc import Callable

import pytest

from baton.cluster_link.messages import DecodeOrder, NodeLeaving, PrefillOrder, SetRoleOrder
from baton.role_split import RoleSplit
from baton.types import Incarnation, NodeName, RequestId
from coordinator.core.common.effects import SendOrder
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, STALL, BrainHarness

P0 = NodeName("p0")


def way(world: BrainHarness, request: RequestId) -> tuple[str, str]:
    told = world.explain_request(request).attempts[-1]
    return told.way, told.why


def dies(world: BrainHarness, prefill: Incarnation) -> None:
    world.lose_node(prefill)


def is_drained(world: BrainHarness, prefill: Incarnation) -> None:
    world.effects += world.brain.drain_node(P0, None, world.now)


def leaves(world: BrainHarness, prefill: Incarnation) -> None:
    world.send_from_node(prefill, NodeLeaving("stopping"))


def stands_still(world: BrainHarness, prefill: Incarnation) -> None:
    world.send_heartbeat(prefill, progress_age_seconds=STALL + 1)


@pytest.mark.parametrize("event", [dies, is_drained, leaves, stands_still])
def test_requests_waiting_for_last_prefill_node_fall_back_to_decode(
    event: Callable[[BrainHarness, Incarnation], None],
) -> None:
    world = BrainHarness(prefill_share=0.25)
    prefill, decode = world.join_node("p0", PREFILL), world.join_node("d0", DECODE, max_num_seqs=8)
    requests = [world.submit(prompt=100) for _ in range(4)]
    assert world.brain.get_request_state(requests[3]) is RequestState.QUEUED, (
        "the window of the prefill node is full"
    )
    event(world, prefill)
    alone = [order for order in world.messages_to(decode, DecodeOrder) if order.kv_writer is None]
    assert alone, "at least one of them has gone on"
    assert {order.prefill_step_share for order in alone} == {0.25}, "what runs there keeps its pace"
    assert {way(world, order.work.key.request_id) for order in alone} == {
        ("local", "no_prefill_node")
    }
    assert world.brain.counters.placements["local", "no_prefill_node"] >= 1
    assert world.brain.is_local_prefill_only
    assert world.brain.why_not_serving() == ""
    assert [world.end_events(request) for request in requests] == [[]] * 4
    again = world.join_node("p2", PREFILL)
    world.submit()
    handed_off = world.messages_to(again, PrefillOrder)
    assert {way(world, order.work.key.request_id) for order in handed_off} == {("hand_off", "mode")}
    assert not world.brain.is_local_prefill_only


def test_decode_nodes_serve_before_prefill_nodes_join() -> None:
    world = BrainHarness()
    world.join_node("d0", DECODE)
    request = world.submit(max_tokens=1)
    assert way(world, request) == ("local", "no_prefill_node")
    assert world.brain.why_no_prefill() == "there is no prefill node"


def test_without_any_node_decode_is_reported_missing() -> None:
    world = BrainHarness()
    world.lose_node(world.join_node("d0", DECODE))
    assert (world.brain.why_not_serving(), world.brain.why_no_prefill()) == (
        "there is no decode node",
        "",
    )
    assert not world.brain.is_local_prefill_only, "nobody computes anything"


def test_colocated_mode_needs_no_prefill_node() -> None:
    world = BrainHarness("colocated")
    world.join_node("d0", DECODE)
    assert (world.brain.why_no_prefill(), world.brain.is_local_prefill_only) == ("", False)


@pytest.mark.parametrize("mode", ["disaggregated", "auto"])
def test_context_too_long_for_prefill_nodes_is_prefilled_on_decode(mode: str) -> None:
    """A prefill node that is too small counts as none, for waiting and for new requests."""
    world = BrainHarness(mode, prefill_share=0.25)
    large, decode = world.join_node("p0", PREFILL), world.join_node("d0", DECODE, max_num_seqs=8)
    small = world.join_node("p1", PREFILL, max_model_len=64)
    begun = world.submit(prompt=100, max_tokens=5)
    world.lose_node(large)
    fresh = world.submit(prompt=100, max_tokens=5)
    orders = [order for order in world.messages_to(decode, DecodeOrder) if order.kv_writer is None]
    assert [order.work.key.request_id for order in orders] == [begun, fresh]
    assert way(world, fresh) == ("local", "prefill_too_small")
    assert {order.prefill_step_share for order in orders} == {0.25}, (
        "what runs there keeps its pace"
    )
    assert not world.messages_to(small, PrefillOrder)
    short = world.submit(prompt=20)
    if mode == "disaggregated":
        assert way(world, begun) == ("local", "prefill_too_small")
        assert way(world, short) == ("hand_off", "mode")
        assert [
            order.prefill_step_share
            for order in world.messages_to(decode, DecodeOrder)
            if order.kv_writer is not None
        ][-1] == 0


def test_small_prefill_node_does_not_bound_request_length() -> None:
    world = BrainHarness()
    world.join_node("p0", PREFILL, max_model_len=64)
    world.join_node("d0", DECODE)
    assert way(world, world.submit(prompt=100, max_tokens=5)) == ("local", "prefill_too_small")


def test_single_token_request_too_long_for_decode_is_served_by_prefill() -> None:
    world = BrainHarness()
    decode, prefill = world.join_node("d0", DECODE), world.join_node("p0", PREFILL)
    world.join_node("d1", DECODE, num_blocks=4)
    world.lose_node(decode)
    request = world.submit(prompt=100, max_tokens=1)
    assert world.last_attempt_key(prefill) == (request, 1, 0)


def test_probe_of_only_prefill_node_uses_it() -> None:
    """The node is out of service until its probe has succeeded; meanwhile decode nodes compute
    other prompts."""
    world = BrainHarness()
    for name in ("d0", "d1", "d2"):
        world.join_node(name, DECODE)
    world.effects += world.brain.set_ratio(RoleSplit(1, 2), 60.0, world.now)
    sent = [effect for effect in world.effects if isinstance(effect, SendOrder)]
    (order,) = [effect for effect in sent if isinstance(effect.order, SetRoleOrder)]
    name = world.brain.node_registry.nodes[order.incarnation].info.name
    world.lose_node(order.incarnation)
    prefill = world.join_node(name, PREFILL)
    (probe,) = world.messages_to(prefill, PrefillOrder)
    assert probe.work.key.request_id.startswith("probe-")
    request = world.submit()
    assert way(world, request) == ("local", "no_prefill_node")
