"""Which nodes take another role: the decision alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.role_split import RoleSplit, format_splits, list_possible_splits, parse_split
from baton.types import NodeName, Role
from coordinator.core.ratio.role_moves import (
    NodeRoleState,
    RoleMove,
    opposite_role,
    plan_role_moves,
)

P, D = Role.PREFILL, Role.DECODE


def role_state(name: str, role: Role, load: int = 0, **fields: bool) -> NodeRoleState:
    return NodeRoleState(NodeName(name), role, attempts=load, **fields)


def moved_nodes(found: list[RoleMove]) -> list[str]:
    return [str(move.name) for move in found]


def test_least_loaded_node_switches() -> None:
    nodes = [
        role_state("p0", P),
        role_state("p1", P),
        role_state("d0", D, 3),
        role_state("d1", D, 1),
        role_state("d2", D, 2),
    ]
    assert plan_role_moves(RoleSplit(3, 2), nodes) == [RoleMove(NodeName("d1"), P)]
    assert plan_role_moves(RoleSplit(4, 1), nodes) == [
        RoleMove(NodeName("d1"), P),
        RoleMove(NodeName("d2"), P),
    ]
    assert plan_role_moves(RoleSplit(2, 3), nodes) == []


def test_last_serving_node_of_wanted_role_stays() -> None:
    drained = role_state("d1", D, is_serving=False)
    assert moved_nodes(
        plan_role_moves(RoleSplit(2, 1), [role_state("p0", P), role_state("d0", D), drained])
    ) == ["d1"]
    assert (
        plan_role_moves(
            RoleSplit(1, 1),
            [role_state("p0", P), role_state("p1", P, is_serving=False, is_locked=True)],
        )
        == []
    )
    assert moved_nodes(
        plan_role_moves(RoleSplit(0, 2), [role_state("p0", P), role_state("d0", D)])
    ) == ["p0"]


def test_switching_nodes_move_first_then_serving_ones() -> None:
    out = role_state("d0", D, is_serving=False)
    nodes = [
        role_state("p0", P),
        out,
        role_state("d1", D, 9),
        role_state("d2", D, 5),
        role_state("d3", D, is_serving=False, is_switching=True),
    ]
    assert moved_nodes(plan_role_moves(RoleSplit(2, 3), nodes)) == ["d3"]
    assert moved_nodes(plan_role_moves(RoleSplit(4, 1), nodes)) == ["d3", "d2", "d0"]


def test_missing_and_extra_nodes_cause_no_moves() -> None:
    assert (
        plan_role_moves(
            RoleSplit(2, 2), [role_state("p0", P), role_state("d0", D), role_state("d1", D)]
        )
        == []
    )
    assert (
        plan_role_moves(
            RoleSplit(1, 1), [role_state("p0", P), role_state("d0", D), role_state("d1", D)]
        )
        == []
    )
    assert moved_nodes(
        plan_role_moves(
            RoleSplit(1, 3), [role_state("p0", P), role_state("p1", P), role_state("d0", D)]
        )
    ) == ["p0"]


def test_unserved_role_recalls_draining_node() -> None:
    leaving = role_state("p1", D, is_serving=False, is_switching=True, is_draining=True)
    gone_on = role_state("p2", D, is_serving=False, is_switching=True, is_locked=True)
    assert plan_role_moves(RoleSplit(1, 3), [leaving, gone_on, role_state("d0", D)]) == [
        RoleMove(NodeName("p1"), P)
    ]
    assert plan_role_moves(RoleSplit(0, 3), [leaving, gone_on, role_state("d0", D)]) == []


of_one = st.tuples(st.sampled_from(Role), st.booleans(), st.booleans(), st.integers(0, 5))
standings = st.lists(of_one, min_size=1, max_size=12).map(
    lambda drawn: [
        NodeRoleState(
            NodeName(f"n{number}"), role, is_serving=serves, is_locked=fixed, attempts=load
        )
        for number, (role, serves, fixed, load) in enumerate(drawn)
    ]
)


@given(nodes=standings, prefill=st.integers(0, 12), extra=st.integers(-2, 2))
def test_moves_terminate_and_never_empty_a_role(
    nodes: list[NodeRoleState], prefill: int, extra: int
) -> None:
    target = RoleSplit(
        min(prefill, len(nodes)), max(0, len(nodes) - min(prefill, len(nodes)) + extra)
    )
    served = {role for role in Role if any(each.is_serving and each.role is role for each in nodes)}
    fixed = {each.name for each in nodes if each.is_locked}
    standing = {each.name: each for each in nodes}
    for _ in range(len(nodes) + 1):
        wanted = plan_role_moves(target, standing.values())
        if not wanted:
            break
        for move in wanted:
            assert move.name not in fixed
            was = standing[move.name]
            assert move.target_role is opposite_role(was.role)
            standing[move.name] = NodeRoleState(
                move.name, move.target_role, is_serving=was.is_serving, attempts=was.attempts
            )
    else:
        raise AssertionError("it does not end")
    for role in served:
        assert not target.node_count(role) or any(
            each.is_serving for each in standing.values() if each.role is role
        )
    if (
        not extra
        and all(each.is_serving and not each.is_locked for each in nodes)
        and 0 < target.prefill_nodes < len(nodes)
    ):
        assert sum(each.role is P for each in standing.values()) == target.prefill_nodes


def test_possible_splits_depend_on_mode_and_node_count() -> None:
    assert [str(split) for split in list_possible_splits(4, "disaggregated")] == [
        "1:3",
        "2:2",
        "3:1",
    ]
    assert [str(split) for split in list_possible_splits(3, "auto")] == ["0:3", "1:2", "2:1"]
    assert [str(split) for split in list_possible_splits(2, "colocated")] == ["0:2"]
    assert [
        list_possible_splits(1, "disaggregated"),
        list_possible_splits(0, "auto"),
        list_possible_splits(0, "colocated"),
    ] == [[]] * 3
    assert format_splits(list_possible_splits(4, "disaggregated")) == "1:3, 2:2, 3:1"
    assert format_splits(list_possible_splits(256, "disaggregated")) == "1:255, 2:254, ..., 255:1"
    assert format_splits([]) == "none"


@pytest.mark.parametrize(
    "text", ["", "3", "3:", ":1", "3:1:0", "-1:2", "a:b", "3.0:1", "٣:١", "9" * 9 + ":1"]
)
def test_invalid_ratio_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not P:D, as in 3:1"):
        parse_split(text)
    assert parse_split("3:1") == RoleSplit(3, 1)
