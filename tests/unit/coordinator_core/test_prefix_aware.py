"""The policies: never one that cannot take it, whoever is soonest, bounded affinity, and no herds."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.types import AttemptKey, Incarnation, NodeName, RequestId, Role
from coordinator.core.cost_model import CostModel
from coordinator.core.loads import Loads
from coordinator.core.placement import Choice, Demand, NodeView, Outlook
from coordinator.core.policies import POLICIES
from coordinator.core.prediction import predict
from coordinator.core.prefix_aware import RAMP, PrefixAware
from coordinator.core.recent_work import WINDOW, RecentWork
from coordinator.core.registry import Node
from tests.unit.coordinator_core.world import DECODE, PREFILL, join_info

NOW = 1000.0
P = NodeView(Incarnation("p"), PREFILL, 64, 512, 0, 0, 0, 4096, None, 0)
D = NodeView(Incarnation("d"), DECODE, 64, 512, 0, 0, 0, 4096, None, 0)
DEMAND = Demand(tokens=1024, blocks=65, prefill=True, decode=True, output=100.0)


def outlook(now: float = NOW) -> Outlook:
    return Outlook(now, CostModel(), 1.0, token_bytes=1024)


def named(view: NodeView, name: str, **changes: object) -> NodeView:
    return replace(view, incarnation=Incarnation(name), name=NodeName(name), **changes)  # type: ignore[arg-type]


def choose(demand: Demand, *nodes: NodeView) -> Choice:
    choice = PrefixAware().choose(demand, nodes, outlook())
    assert choice is not None
    return choice


@pytest.mark.parametrize("wanted", ["prefill", "decode"])
def test_who_holds_the_prefix_is_chosen(wanted: str) -> None:
    nodes = [named(P, "p0"), named(P, "p1", last_placed=9), named(D, "d0"), named(D, "d1", last_placed=9)]
    holder = Incarnation("p1" if wanted == "prefill" else "d1")
    choice = choose(replace(DEMAND, held={holder: 960}), *nodes)
    assert getattr(choice, wanted) == holder
    assert choose(DEMAND, *nodes) == Choice(Incarnation("p0"), Incarnation("d0"))


def test_a_queue_outweighs_a_prefix() -> None:
    busy = named(P, "p1", queued_seconds=5.0, head_seconds=5.0, head_since=NOW - 1.0)
    assert choose(replace(DEMAND, held={busy.incarnation: 960}), named(P, "p0"), busy, D).prefill == "p0"
    done = replace(busy, head_since=NOW - 5.0)  # its head must be over by now
    assert choose(replace(DEMAND, held={busy.incarnation: 960}), named(P, "p0"), done, D).prefill == "p1"


def test_affinity_ends_where_the_load_is_far_above_the_mean() -> None:
    hot = named(P, "hot", recent_work=20.0)
    others = [named(P, f"p{number}", recent_work=10.0) for number in range(3)]
    demand = replace(DEMAND, held={hot.incarnation: 960})
    assert choose(demand, hot, *others, D).prefill != "hot"
    assert choose(demand, replace(hot, recent_work=12.0), *others, D).prefill == "hot"
    idle = [replace(node, recent_work=node.recent_work / 100) for node in (hot, *others)]
    assert choose(demand, *idle, D).prefill == "hot"  # nobody has much to do
    crowd = [named(D, "d0", attempts=9), *(named(D, f"d{number}", attempts=4) for number in range(1, 4))]
    assert choose(replace(DEMAND, held={Incarnation("d0"): 960}), P, *crowd).decode != "d0"


def test_a_decode_node_without_blocks_to_grow_stands_back() -> None:
    tight = named(D, "tight", room=66)
    assert choose(replace(DEMAND, output=500.0), P, tight, named(D, "roomy", last_placed=9)).decode == "roomy"


def test_one_that_has_just_joined_is_given_more_and_more() -> None:
    new = named(D, "new", attempts=7, joined_at=NOW - RAMP / 10)
    full = named(D, "old", attempts=8)
    assert choose(DEMAND, P, new, full).decode == "old"
    assert choose(DEMAND, P, replace(new, joined_at=NOW - RAMP / 2), full).decode == "new"
    assert choose(DEMAND, P, new).decode == "new"


def test_colocated_prompts_count_queue_and_computing() -> None:
    alone = replace(DEMAND, prefill=False)
    busy = named(D, "busy", queued_seconds=3.0, head_seconds=3.0, head_since=NOW)
    assert choose(alone, busy, named(D, "free", last_placed=9)) == Choice(None, Incarnation("free"))
    assert choose(replace(alone, held={Incarnation("d1"): 960}), D, named(D, "d1", last_placed=9)).decode == "d1"


def test_a_choice_says_what_it_predicted() -> None:
    demand = replace(DEMAND, held={Incarnation("p"): 512})
    nodes = (P, named(P, "p1"), D)
    choice = choose(demand, *nodes)
    assert choice.scores.keys() == {"p", "p1", "d"}
    assert choice.scores[Incarnation("p")] < choice.scores[Incarnation("p1")]
    expected = predict(demand, choice, nodes, outlook())
    assert choice.scores[Incarnation("p")] == pytest.approx(expected.queue + expected.prefill + expected.transfer)


views = st.builds(
    NodeView,
    incarnation=st.integers(0, 10**6).map(lambda number: Incarnation(str(number))),
    role=st.sampled_from(Role),
    max_num_seqs=st.integers(1, 8),
    max_batched_tokens=st.just(64),
    attempts=st.integers(0, 9),
    computing=st.integers(0, 9),
    uncomputed_tokens=st.integers(0, 300),
    room=st.integers(-5, 40),
    closed_from=st.none() | st.integers(1, 40),
    last_placed=st.integers(0, 99),
    joined_at=st.floats(NOW - 20, NOW),
    queued_seconds=st.floats(0, 10),
    recent_work=st.floats(0, 100),
)


@pytest.mark.parametrize("name", POLICIES)
@given(
    nodes=st.lists(views, max_size=8, unique_by=lambda view: view.incarnation),
    demand=st.builds(
        Demand,
        tokens=st.integers(1, 300),
        blocks=st.integers(1, 20),
        prefill=st.booleans(),
        decode=st.just(True),
        output=st.floats(1, 1000),
    ),
    data=st.data(),
)
def test_nobody_is_chosen_who_cannot_take_it(
    name: str, nodes: list[NodeView], demand: Demand, data: st.DataObject
) -> None:
    names = [node.incarnation for node in nodes]
    some = st.sets(st.sampled_from(names)) if names else st.just(set[Incarnation]())
    held = {node: data.draw(st.integers(0, 300)) for node in sorted(data.draw(some))}
    demand = replace(demand, avoid=frozenset(data.draw(some)), held=held)
    choice = POLICIES[name]().choose(demand, nodes, outlook())
    able = {role: [node for node in nodes if node.role is role and node.takes(demand)] for role in Role}
    wanted = [DECODE, PREFILL] if demand.prefill else [DECODE]
    assert (choice is None) == any(not able[role] for role in wanted)
    if choice is None:
        return
    for role, chosen in ((PREFILL, choice.prefill), (DECODE, choice.decode)):
        assert (chosen is not None) == (role in wanted)
        if chosen is not None:
            assert chosen in {node.incarnation for node in able[role]}
            others = {node.incarnation for node in able[role]} - demand.avoid
            assert chosen in others or not others


@pytest.mark.parametrize("name", POLICIES)
def test_a_thousand_at_once_are_spread(name: str) -> None:
    """All of one prompt, which one node of each role holds: by its own books, before anybody has reported."""
    loads, policy, costs = Loads(), POLICIES[name](), CostModel()
    sizes = {"num_blocks": 100_000, "max_num_seqs": 4096, "max_batched_tokens": 65536}
    nodes = [
        Node(join_info(f"{role.value}{number}", role, **sizes), Incarnation(f"{role.value}{number}"), 0.0, 0.0, b"")
        for role in Role
        for number in range(8)
    ]
    for node in nodes:
        loads.add_node(node.incarnation)
    demand = replace(DEMAND, tokens=64, blocks=5, held={Incarnation("prefill0"): 48, Incarnation("decode0"): 48})
    taken: Counter[Incarnation] = Counter()
    for number in range(1000):
        loads.keep_scale(NOW)
        seen = Outlook(NOW, costs, loads.unit(NOW), token_bytes=1024)
        place = [loads.view(node) for node in nodes]
        choice = policy.choose(demand, place, seen)
        assert choice is not None
        expected = predict(demand, choice, place, seen)
        for node in (choice.prefill, choice.decode):
            assert node is not None
            taken[node] += 1
            seconds = expected.prefill if node == choice.prefill else 0.0
            key = AttemptKey(RequestId(f"r{number}"), 1, 0)
            loads.place(node, key, 64, 5, seconds=seconds, resident=expected.resident, now=NOW)
    assert (sum(taken.values()), len(taken)) == (2000, 16)
    assert max(taken[node.incarnation] for node in nodes if node.info.role is DECODE) <= 1.5 * 125
    work = [loads.view(node).queued_seconds for node in nodes if node.info.role is PREFILL]
    assert max(work) <= 1.5 * sum(work) / 8  # who holds the prefix computes more prompts in the same time


def test_recent_work_fades_and_floats_do_not_end() -> None:
    recent = RecentWork()
    assert recent.keep_scale(1e9)
    recent.add("a", 1.0, 1e9)
    assert not recent.keep_scale(1e9 + WINDOW)
    recent.add("b", 1.0, 1e9 + WINDOW)
    assert recent.of("b") == pytest.approx(recent.of("a") * math.e)
    later = 1e9 + 1e6 * WINDOW
    assert recent.keep_scale(later)
    recent.add("c", 1.0, later)
    assert (recent.of("c"), recent.unit(later)) == (1.0, 1.0)
    assert recent.of("a") == 0.0
    recent.forget("c")
    assert recent.of("c") == 0.0


def test_a_change_of_scale_is_seen_in_every_view() -> None:
    loads = Loads()
    nodes = [Node(join_info(name, PREFILL), Incarnation(name), 0.0, 0.0, b"") for name in ("p0", "p1")]
    for node in nodes:
        loads.add_node(node.incarnation)
        loads.keep_scale(NOW)
        loads.place(node.incarnation, AttemptKey(RequestId(node.info.name), 1, 0), 1, 1, seconds=1.0, now=NOW)
    assert [loads.view(node).recent_work for node in nodes] == [1.0, 1.0]
    loads.keep_scale(NOW + 1e6)
    assert [loads.view(node).recent_work for node in nodes] == [0.0, 0.0]
