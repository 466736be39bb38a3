"""Windows, choice, and the books they rest on."""

from dataclasses import replace

import pytest

from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core import messages as m
from coordinator.core.cost_model import CostModel
from coordinator.core.loads import Loads
from coordinator.core.placement import Choice, Demand, NodeView, Outlook
from coordinator.core.registry import Node
from coordinator.core.simple_policies import LeastLoaded
from tests.unit.coordinator_core.world import DECODE, PREFILL, World, join_info

P = NodeView(Incarnation("p"), PREFILL, 4, 64, 0, 0, 0, 32, None, 0)
D = NodeView(Incarnation("d"), DECODE, 4, 64, 0, 0, 0, 32, None, 0)
BOTH = Demand(tokens=20, blocks=2, prefill=True, decode=True)


def choose(demand: Demand, *nodes: NodeView) -> Choice | None:
    return LeastLoaded().choose(demand, nodes, Outlook(0.0, CostModel()))


@pytest.mark.parametrize(
    ("computing", "uncomputed", "tokens", "takes"),
    [
        (0, 0, 10_000, True),  # always one
        (1, 10_000, 10_000, True),  # and the next
        (2, 10_000, 1, False),
        (2, 100, 28, True),  # many small ones, up to two steps' worth of tokens
        (2, 100, 29, False),
        (4, 4, 1, False),  # never more than the node runs at once
    ],
)
def test_prefill_window(computing: int, uncomputed: int, tokens: int, takes: bool) -> None:
    node = replace(P, computing=computing, uncomputed_tokens=uncomputed, window_tokens=uncomputed)
    assert node.takes_prefill(replace(BOTH, tokens=tokens)) is takes


@pytest.mark.parametrize(
    ("attempts", "room", "closed", "takes"),
    [
        (0, 2, None, True),
        (3, 2, None, True),
        (4, 32, None, False),
        (0, 1, None, False),
        (0, 9, 2, False),
        (0, 9, 3, True),
    ],
)
def test_decode_window(attempts: int, room: int, closed: int | None, takes: bool) -> None:
    assert replace(D, attempts=attempts, room=room, closed_from=closed).takes_decode(BOTH) is takes


@pytest.mark.parametrize(
    ("attempts", "room", "computing", "decode", "prefill"),
    [
        (0, 2, 0, True, True),  # an empty node, whatever it leaves
        (2, 10, 0, True, True),
        (3, 32, 0, False, True),  # one of four places is kept
        (2, 9, 0, False, True),  # and 8 of 32 blocks
        (2, 10, 1, True, False),  # one prompt at a time
    ],
)
def test_who_had_more_than_its_share_leaves_headroom(
    attempts: int, room: int, computing: int, decode: bool, prefill: bool
) -> None:
    greedy = replace(BOTH, tokens=100, headroom=0.2)
    busy = {"attempts": attempts, "computing": computing, "window_tokens": 100 * computing}
    on_decode, on_prefill = replace(D, room=room, blocks=40, **busy), replace(P, **busy)
    assert on_decode.takes_decode(greedy) is decode
    assert on_prefill.takes_prefill(greedy) is prefill
    assert on_decode.takes_decode(BOTH)
    assert on_prefill.takes_prefill(BOTH)


def test_headroom_is_kept_of_what_the_reserve_leaves() -> None:
    node = replace(D, max_num_seqs=10, blocks=100, room=100, attempts=4)
    greedy = replace(BOTH, reserve=0.3, headroom=0.25)  # 3 of 10 places, and 2 of 7
    assert node.takes_decode(greedy)
    assert not replace(node, attempts=5).takes_decode(greedy)
    assert replace(node, attempts=6).takes_decode(replace(greedy, headroom=0.0))
    assert replace(node, room=2 + 30 + 17).takes_decode(greedy)
    assert not replace(node, room=1 + 30 + 17).takes_decode(greedy)


@pytest.mark.parametrize(
    ("reserve", "max_num_seqs", "others"),
    [(0.3, 1, 1), (0.3, 2, 1), (0.3, 3, 2), (0.3, 8, 5), (0.3, 10, 7), (0.07, 100, 93), (1.0, 4, 1)],
)
def test_a_reserve_is_rounded_up_and_leaves_a_place(reserve: float, max_num_seqs: int, others: int) -> None:
    node, later_class = replace(D, max_num_seqs=max_num_seqs), replace(BOTH, reserve=reserve)
    assert replace(node, attempts=others - 1).takes_decode(later_class)
    assert not replace(node, attempts=others).takes_decode(later_class)


def test_the_least_loaded_of_each_role() -> None:
    busy_p = replace(P, incarnation=Incarnation("busy p"), computing=1, uncomputed_tokens=5)
    busy_d = replace(D, incarnation=Incarnation("busy d"), attempts=1)
    full_d = replace(D, incarnation=Incarnation("full d"), room=30)
    assert choose(BOTH, busy_p, P, busy_d, full_d, D) == Choice(P.incarnation, D.incarnation)


def test_ties_go_round() -> None:
    late = replace(P, incarnation=Incarnation("late"), last_placed=9)
    chosen = choose(BOTH, late, P, D)
    assert chosen is not None
    assert chosen.prefill == P.incarnation


def test_both_or_none() -> None:
    assert choose(BOTH, P) is None
    assert choose(BOTH, D) is None
    assert choose(replace(BOTH, decode=False), P) == Choice(P.incarnation, None)
    assert choose(replace(BOTH, prefill=False), P, D) == Choice(None, D.incarnation)


def test_avoided_nodes_are_taken_if_there_is_no_other() -> None:
    demand = replace(BOTH, avoid=frozenset({P.incarnation}))
    busy = replace(P, incarnation=Incarnation("busy"), computing=1, uncomputed_tokens=50)
    assert choose(demand, P, busy, D) == Choice(busy.incarnation, D.incarnation)
    assert choose(demand, P, D) == Choice(P.incarnation, D.incarnation)


# the books


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(f"r{number}"), 1, 0)


@pytest.fixture
def node() -> Node:
    return Node(join_info("d0", DECODE), Incarnation("d0"), 0.0, 0.0, b"")


@pytest.fixture
def loads(node: Node) -> Loads:
    loads = Loads()
    loads.add_node(node.incarnation)
    return loads


def test_room_is_what_was_reported_less_what_the_report_cannot_have_seen(loads: Loads, node: Node) -> None:
    d = node.incarnation
    loads.place(d, key(1), tokens=40, blocks=4)
    assert loads.view(node).room == 28
    loads.report(d, 32)  # sent before the node had heard of it
    assert loads.view(node).room == 28
    loads.heard_of(d, key(1))
    loads.report(d, 27)  # it has: and it took one block more than expected
    assert loads.view(node).room == 27
    loads.place(d, key(2), tokens=20, blocks=2)
    assert loads.view(node).room == 25
    loads.end(d, key(1))
    assert loads.view(node).room == 29
    loads.end(d, key(2))
    assert loads.view(node).room == 31
    loads.report(d, 32)
    assert loads.view(node).room == 32


def test_ending_twice_or_nowhere_changes_nothing(loads: Loads, node: Node) -> None:
    loads.place(node.incarnation, key(1), 10, 1)
    loads.end(node.incarnation, key(1))
    loads.end(node.incarnation, key(1))
    loads.end(Incarnation("nobody"), key(1))
    assert loads.view(node).room == 32
    assert loads.busy() == set()


def test_a_refusal_closes_for_its_size_and_is_a_report(loads: Loads, node: Node) -> None:
    d = node.incarnation
    loads.refused(d, m.Refused(key(1), needed=6, free=3), blocks=4)
    view = loads.view(node)
    assert (view.room, view.closed_from) == (3, 4)
    loads.report(d, 5)
    assert loads.view(node).closed_from == 4
    loads.report(d, 6)
    assert loads.view(node).closed_from is None


def test_the_smallest_refused_demand_stays_closed(loads: Loads, node: Node) -> None:
    loads.close(node.incarnation, blocks=2, needed=3)
    loads.close(node.incarnation, blocks=9, needed=9)
    assert loads.view(node).closed_from == 2


def test_only_a_leg_from_before_the_refusal_reopens(loads: Loads, node: Node) -> None:
    d = node.incarnation
    loads.place(d, key(1), 10, 1)
    loads.close(d, blocks=2, needed=2)
    loads.place(d, key(2), 10, 1)
    loads.end(d, key(2))
    assert loads.view(node).closed_from == 2
    loads.end(d, key(1))
    assert loads.view(node).closed_from is None


def test_prefill_counts_what_is_not_computed_yet() -> None:
    world = World()
    p0 = world.join("p0", PREFILL)
    world.join("d0", DECODE)
    for _ in range(3):
        world.submit(prompt=60)
    assert (world.brain.placed_on(p0), world.brain.queued) == (2, 1)
    world.prefill_ended(p0, AttemptKey(RequestId("r1"), 1, 0))
    assert (world.brain.placed_on(p0), world.brain.queued) == (3, 0)


def test_decode_is_given_no_more_than_it_runs_at_once() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE, max_num_seqs=2)
    requests = [world.submit() for _ in range(3)]
    assert (world.brain.placed_on(d0), world.brain.queued) == (2, 1)
    world.cancel(requests[0])
    assert (world.brain.placed_on(d0), world.brain.queued) == (2, 0)
