"""Which nodes accept a demand, and which of them the least-loaded policy chooses."""

from dataclasses import replace
from typing import Any

import pytest

from baton.types import Incarnation
from coordinator.core.estimates.cost_model import CostModel
from coordinator.core.placement.interface import NodeChoice, PlacementContext
from coordinator.core.placement.node_loads import NodeView, PlacementDemand
from coordinator.core.placement.policies import LeastLoadedPolicy
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL

P = NodeView(Incarnation("p"), PREFILL, 4, 64, 0, 0, 0, 32, None, 0)
D = NodeView(Incarnation("d"), DECODE, 4, 64, 0, 0, 0, 32, None, 0)
BOTH = PlacementDemand(context_tokens=20, blocks=2, needs_prefill=True, needs_decode=True)


def choose(demand: PlacementDemand, *nodes: NodeView) -> NodeChoice | None:
    return LeastLoadedPolicy().choose_nodes(demand, nodes, PlacementContext(0.0, CostModel()))


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
def test_prefill_node_accepts_prompts_within_its_window(
    computing: int, uncomputed: int, tokens: int, takes: bool
) -> None:
    node = replace(
        P, pending_prefills=computing, uncomputed_tokens=uncomputed, window_tokens=uncomputed
    )
    assert node.can_accept_prefill(replace(BOTH, context_tokens=tokens)) is takes


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
def test_decode_node_accepts_requests_within_slots_and_blocks(
    attempts: int, room: int, closed: int | None, takes: bool
) -> None:
    assert (
        replace(
            D, attempts=attempts, free_blocks=room, refused_from_blocks=closed
        ).can_accept_decode(BOTH)
        is takes
    )


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
def test_tenant_above_share_leaves_headroom(
    attempts: int, room: int, computing: int, decode: bool, prefill: bool
) -> None:
    greedy = replace(BOTH, context_tokens=100, headroom_share=0.2)
    busy: dict[str, Any] = {
        "attempts": attempts,
        "pending_prefills": computing,
        "window_tokens": 100 * computing,
    }
    on_decode, on_prefill = (
        replace(D, free_blocks=room, total_blocks=40, **busy),
        replace(P, **busy),
    )
    assert on_decode.can_accept_decode(greedy) is decode
    assert on_prefill.can_accept_prefill(greedy) is prefill
    assert on_decode.can_accept_decode(BOTH)
    assert on_prefill.can_accept_prefill(BOTH)


def test_headroom_is_taken_from_what_reserve_leaves() -> None:
    node = replace(D, max_num_seqs=10, total_blocks=100, free_blocks=100, attempts=4)
    greedy = replace(BOTH, reserved_share=0.3, headroom_share=0.25)  # 3 of 10 places, and 2 of 7
    assert node.can_accept_decode(greedy)
    assert not replace(node, attempts=5).can_accept_decode(greedy)
    assert replace(node, attempts=6).can_accept_decode(replace(greedy, headroom_share=0.0))
    assert replace(node, free_blocks=2 + 30 + 17).can_accept_decode(greedy)
    assert not replace(node, free_blocks=1 + 30 + 17).can_accept_decode(greedy)


@pytest.mark.parametrize(
    ("reserve", "max_num_seqs", "others"),
    [
        (0.3, 1, 1),
        (0.3, 2, 1),
        (0.3, 3, 2),
        (0.3, 8, 5),
        (0.3, 10, 7),
        (0.07, 100, 93),
        (1.0, 4, 1),
    ],
)
def test_reserve_is_rounded_up_and_leaves_a_slot(
    reserve: float, max_num_seqs: int, others: int
) -> None:
    node, later_class = replace(D, max_num_seqs=max_num_seqs), replace(BOTH, reserved_share=reserve)
    assert replace(node, attempts=others - 1).can_accept_decode(later_class)
    assert not replace(node, attempts=others).can_accept_decode(later_class)


def test_least_loaded_node_of_each_role_is_chosen() -> None:
    busy_p = replace(P, incarnation=Incarnation("busy p"), pending_prefills=1, uncomputed_tokens=5)
    busy_d = replace(D, incarnation=Incarnation("busy d"), attempts=1)
    full_d = replace(D, incarnation=Incarnation("full d"), free_blocks=30)
    assert choose(BOTH, busy_p, P, busy_d, full_d, D) == NodeChoice(P.incarnation, D.incarnation)


def test_equally_loaded_nodes_are_chosen_round_robin() -> None:
    late = replace(P, incarnation=Incarnation("late"), last_placed_serial=9)
    chosen = choose(BOTH, late, P, D)
    assert chosen is not None
    assert chosen.prefill == P.incarnation


def test_both_roles_are_chosen_or_none() -> None:
    assert choose(BOTH, P) is None
    assert choose(BOTH, D) is None
    assert choose(replace(BOTH, needs_decode=False), P) == NodeChoice(P.incarnation, None)
    assert choose(replace(BOTH, needs_prefill=False), P, D) == NodeChoice(None, D.incarnation)


def test_avoided_nodes_are_taken_if_there_is_no_other() -> None:
    demand = replace(BOTH, avoided_nodes=frozenset({P.incarnation}))
    busy = replace(P, incarnation=Incarnation("busy"), pending_prefills=1, uncomputed_tokens=50)
    assert choose(demand, P, busy, D) == NodeChoice(busy.incarnation, D.incarnation)
    assert choose(demand, P, D) == NodeChoice(P.incarnation, D.incarnation)
