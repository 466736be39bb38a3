"""The prefix-aware policy: only nodes that accept, the fastest first, with bounded affinity and
no herding."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import AttemptKey, Incarnation, RequestId, Role
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.estimates.workload import WINDOW_SECONDS, RecentWork
from coordinator.core.membership.node_registry import NodeMember
from coordinator.core.placement.interface import NodeChoice, PlacementContext
from coordinator.core.placement.node_loads import NodeLoads, NodeView, PlacementDemand
from coordinator.core.placement.policies import (
    POLICIES,
    RAMP_UP_SECONDS,
    PrefixAwarePolicy,
    predict_latency,
)
from simulator.node_messages import make_join_info
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL
from tests.unit.coordinator.core.placement.sample_nodes import (
    DEMAND,
    NOW,
    D,
    P,
    named_view,
    placement_context,
)


def choose(demand: PlacementDemand, *nodes: NodeView) -> NodeChoice:
    choice = PrefixAwarePolicy().choose_nodes(demand, nodes, placement_context())
    assert choice is not None
    return choice


@pytest.mark.parametrize("wanted", ["prefill", "decode"])
def test_prefix_holder_is_chosen(wanted: str) -> None:
    nodes = [
        named_view(P, "p0"),
        named_view(P, "p1", last_placed_serial=9),
        named_view(D, "d0"),
        named_view(D, "d1", last_placed_serial=9),
    ]
    holder = Incarnation("p1" if wanted == "prefill" else "d1")
    choice = choose(replace(DEMAND, cached_by_node={holder: 960}), *nodes)
    assert getattr(choice, wanted) == holder
    assert choose(DEMAND, *nodes) == NodeChoice(Incarnation("p0"), Incarnation("d0"))


def test_long_queue_outweighs_a_cached_prefix() -> None:
    busy = named_view(P, "p1", queued_seconds=5.0, head_prefill_seconds=5.0, head_since=NOW - 1.0)
    assert (
        choose(
            replace(DEMAND, cached_by_node={busy.incarnation: 960}), named_view(P, "p0"), busy, D
        ).prefill
        == "p0"
    )
    done = replace(busy, head_since=NOW - 5.0)  # its head must be over by now
    assert (
        choose(
            replace(DEMAND, cached_by_node={busy.incarnation: 960}), named_view(P, "p0"), done, D
        ).prefill
        == "p1"
    )


def test_affinity_ends_above_load_bound() -> None:
    hot = named_view(P, "hot", recent_work=20.0)
    others = [named_view(P, f"p{number}", recent_work=10.0) for number in range(3)]
    demand = replace(DEMAND, cached_by_node={hot.incarnation: 960})
    assert choose(demand, hot, *others, D).prefill != "hot"
    assert choose(demand, replace(hot, recent_work=12.0), *others, D).prefill == "hot"
    idle = [replace(node, recent_work=node.recent_work / 100) for node in (hot, *others)]
    assert choose(demand, *idle, D).prefill == "hot"  # nobody has much to do
    crowd = [
        named_view(D, "d0", attempts=9),
        *(named_view(D, f"d{number}", attempts=4) for number in range(1, 4)),
    ]
    assert (
        choose(replace(DEMAND, cached_by_node={Incarnation("d0"): 960}), P, *crowd).decode != "d0"
    )


def test_decode_node_without_growth_blocks_is_penalized() -> None:
    tight = named_view(D, "tight", free_blocks=66)
    assert (
        choose(
            replace(DEMAND, expected_output_tokens=500.0),
            P,
            tight,
            named_view(D, "roomy", last_placed_serial=9),
        ).decode
        == "roomy"
    )


def test_newly_joined_node_ramps_up() -> None:
    new = named_view(D, "new", attempts=7, joined_at=NOW - RAMP_UP_SECONDS / 10)
    full = named_view(D, "old", attempts=8)
    assert choose(DEMAND, P, new, full).decode == "old"
    assert (
        choose(DEMAND, P, replace(new, joined_at=NOW - RAMP_UP_SECONDS / 2), full).decode == "new"
    )
    assert choose(DEMAND, P, new).decode == "new"


def test_colocated_prediction_counts_queue_and_prefill() -> None:
    alone = replace(DEMAND, needs_prefill=False)
    busy = named_view(D, "busy", queued_seconds=3.0, head_prefill_seconds=3.0, head_since=NOW)
    assert choose(alone, busy, named_view(D, "free", last_placed_serial=9)) == NodeChoice(
        None, Incarnation("free")
    )
    assert (
        choose(
            replace(alone, cached_by_node={Incarnation("d1"): 960}),
            D,
            named_view(D, "d1", last_placed_serial=9),
        ).decode
        == "d1"
    )


def test_choice_carries_predicted_seconds() -> None:
    demand = replace(DEMAND, cached_by_node={Incarnation("p"): 512})
    nodes = (P, named_view(P, "p1"), D)
    choice = choose(demand, *nodes)
    assert choice.predicted_seconds.keys() == {"p", "p1", "d"}
    assert choice.predicted_seconds[Incarnation("p")] < choice.predicted_seconds[Incarnation("p1")]
    expected = predict_latency(demand, choice, nodes, placement_context())
    assert choice.predicted_seconds[Incarnation("p")] == pytest.approx(
        expected.queue_seconds + expected.prefill_seconds + expected.transfer_seconds
    )


views = st.builds(
    NodeView,
    incarnation=st.integers(0, 10**6).map(lambda number: Incarnation(str(number))),
    role=st.sampled_from(Role),
    max_num_seqs=st.integers(1, 8),
    max_batched_tokens=st.just(64),
    attempts=st.integers(0, 9),
    pending_prefills=st.integers(0, 9),
    uncomputed_tokens=st.integers(0, 300),
    free_blocks=st.integers(-5, 40),
    refused_from_blocks=st.none() | st.integers(1, 40),
    last_placed_serial=st.integers(0, 99),
    joined_at=st.floats(NOW - 20, NOW),
    queued_seconds=st.floats(0, 10),
    recent_work=st.floats(0, 100),
)


@pytest.mark.parametrize("name", POLICIES)
@given(
    nodes=st.lists(views, max_size=8, unique_by=lambda view: view.incarnation),
    demand=st.builds(
        PlacementDemand,
        context_tokens=st.integers(1, 300),
        blocks=st.integers(1, 20),
        needs_prefill=st.booleans(),
        needs_decode=st.just(True),
        expected_output_tokens=st.floats(1, 1000),
    ),
    data=st.data(),
)
def test_chosen_nodes_can_accept_demand(
    name: str, nodes: list[NodeView], demand: PlacementDemand, data: st.DataObject
) -> None:
    names = [node.incarnation for node in nodes]
    some = st.sets(st.sampled_from(names)) if names else st.just(set[Incarnation]())
    held = {node: data.draw(st.integers(0, 300)) for node in sorted(data.draw(some))}
    demand = replace(demand, avoided_nodes=frozenset(data.draw(some)), cached_by_node=held)
    choice = POLICIES[name]().choose_nodes(demand, nodes, placement_context())
    able = {
        role: [node for node in nodes if node.role is role and node.can_accept(demand)]
        for role in Role
    }
    wanted = [DECODE, PREFILL] if demand.needs_prefill else [DECODE]
    assert (choice is None) == any(not able[role] for role in wanted)
    if choice is None:
        return
    for role, chosen in ((PREFILL, choice.prefill), (DECODE, choice.decode)):
        assert (chosen is not None) == (role in wanted)
        if chosen is not None:
            assert chosen in {node.incarnation for node in able[role]}
            others = {node.incarnation for node in able[role]} - demand.avoided_nodes
            assert chosen in others or not others


@pytest.mark.parametrize("name", POLICIES)
def test_thousand_simultaneous_requests_are_spread(name: str) -> None:
    """All have one prompt that one node of each role has cached. They are spread by the loads
    alone, before any node reports."""
    loads, policy, costs = NodeLoads(), POLICIES[name](), CostModel()
    sizes = {"num_blocks": 100_000, "max_num_seqs": 4096, "max_batched_tokens": 65536}
    nodes = [
        NodeMember(
            make_join_info(f"{role.value}{number}", role, **sizes),
            Incarnation(f"{role.value}{number}"),
            0.0,
            0.0,
            b"",
        )
        for role in Role
        for number in range(8)
    ]
    for node in nodes:
        loads.add_node(node.incarnation)
    demand = replace(
        DEMAND,
        context_tokens=64,
        blocks=5,
        cached_by_node={Incarnation("prefill0"): 48, Incarnation("decode0"): 48},
    )
    taken: Counter[Incarnation] = Counter()
    for number in range(1000):
        loads.rescale_recent_work(NOW)
        seen = PlacementContext(NOW, costs, loads.work_unit(NOW), token_bytes=1024)
        place = [loads.get_view(node) for node in nodes]
        choice = policy.choose_nodes(demand, place, seen)
        assert choice is not None
        expected = predict_latency(demand, choice, place, seen)
        for chosen in (choice.prefill, choice.decode):
            assert chosen is not None
            taken[chosen] += 1
            seconds = expected.prefill_seconds if chosen == choice.prefill else 0.0
            key = AttemptKey(RequestId(f"r{number}"), 1, 0)
            loads.add_leg(
                chosen, key, 64, 5, seconds=seconds, resident=expected.resident_tokens, now=NOW
            )
    assert (sum(taken.values()), len(taken)) == (2000, 16)
    assert max(taken[node.incarnation] for node in nodes if node.info.role is DECODE) <= 1.5 * 125
    work = [loads.get_view(node).queued_seconds for node in nodes if node.info.role is PREFILL]
    assert (
        max(work) <= 1.5 * sum(work) / 8
    )  # who holds the prefix computes more prompts in the same time


def test_recent_work_decays_without_overflow() -> None:
    recent = RecentWork()
    assert recent.rescale(1e9)
    recent.add_work("a", 1.0, 1e9)
    assert not recent.rescale(1e9 + WINDOW_SECONDS)
    recent.add_work("b", 1.0, 1e9 + WINDOW_SECONDS)
    assert recent.get_work("b") == pytest.approx(recent.get_work("a") * math.e)
    later = 1e9 + 1e6 * WINDOW_SECONDS
    assert recent.rescale(later)
    recent.add_work("c", 1.0, later)
    assert (recent.get_work("c"), recent.work_unit(later)) == (1.0, 1.0)
    assert recent.get_work("a") == 0.0
    recent.remove_key("c")
    assert recent.get_work("c") == 0.0


def test_recent_work_rescale_updates_every_view() -> None:
    loads = NodeLoads()
    nodes = [
        NodeMember(make_join_info(name, PREFILL), Incarnation(name), 0.0, 0.0, b"")
        for name in ("p0", "p1")
    ]
    for node in nodes:
        loads.add_node(node.incarnation)
        loads.rescale_recent_work(NOW)
        loads.add_leg(
            node.incarnation,
            AttemptKey(RequestId(node.info.name), 1, 0),
            1,
            1,
            seconds=1.0,
            now=NOW,
        )
    assert [loads.get_view(node).recent_work for node in nodes] == [1.0, 1.0]
    loads.rescale_recent_work(NOW + 1e6)
    assert [loads.get_view(node).recent_work for node in nodes] == [0.0, 0.0]
