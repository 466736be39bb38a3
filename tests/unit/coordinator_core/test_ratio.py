"""Which nodes take another role: the decision alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.ratio import Split, parse_split, possible_splits, told
from baton.types import NodeName, Role
from coordinator.core.ratio import Move, Standing, moves, other

P, D = Role.PREFILL, Role.DECODE


def node(name: str, role: Role, load: int = 0, **fields: bool) -> Standing:
    return Standing(NodeName(name), role, load=load, **fields)


def names(found: list[Move]) -> list[str]:
    return [str(move.name) for move in found]


def test_the_least_loaded_goes() -> None:
    nodes = [node("p0", P), node("p1", P), node("d0", D, 3), node("d1", D, 1), node("d2", D, 2)]
    assert moves(Split(3, 2), nodes) == [Move(NodeName("d1"), P)]
    assert moves(Split(4, 1), nodes) == [Move(NodeName("d1"), P), Move(NodeName("d2"), P)]
    assert moves(Split(2, 3), nodes) == []


def test_the_last_in_service_stays_while_its_role_is_wanted() -> None:
    drained = node("d1", D, serves=False)
    assert names(moves(Split(2, 1), [node("p0", P), node("d0", D), drained])) == ["d1"]
    assert moves(Split(1, 1), [node("p0", P), node("p1", P, serves=False, fixed=True)]) == []
    assert names(moves(Split(0, 2), [node("p0", P), node("d0", D)])) == ["p0"]


def test_in_service_before_out_of_it_and_on_its_way_before_both() -> None:
    out = node("d0", D, serves=False)
    nodes = [node("p0", P), out, node("d1", D, 9), node("d2", D, 5), node("d3", D, serves=False, moving=True)]
    assert names(moves(Split(2, 3), nodes)) == ["d3"]
    assert names(moves(Split(4, 1), nodes)) == ["d3", "d2", "d0"]


def test_missing_and_extra_nodes_make_nobody_move_to_and_fro() -> None:
    assert moves(Split(2, 2), [node("p0", P), node("d0", D), node("d1", D)]) == []
    assert moves(Split(1, 1), [node("p0", P), node("d0", D), node("d1", D)]) == []
    assert names(moves(Split(1, 3), [node("p0", P), node("p1", P), node("d0", D)])) == ["p0"]


def test_a_role_without_service_calls_back_who_is_leaving_it() -> None:
    leaving = node("p1", D, serves=False, moving=True, leaving=True)
    gone_on = node("p2", D, serves=False, moving=True, fixed=True)
    assert moves(Split(1, 3), [leaving, gone_on, node("d0", D)]) == [Move(NodeName("p1"), P)]
    assert moves(Split(0, 3), [leaving, gone_on, node("d0", D)]) == []


of_one = st.tuples(st.sampled_from(Role), st.booleans(), st.booleans(), st.integers(0, 5))
standings = st.lists(of_one, min_size=1, max_size=12).map(
    lambda drawn: [
        Standing(NodeName(f"n{number}"), role, serves=serves, fixed=fixed, load=load)
        for number, (role, serves, fixed, load) in enumerate(drawn)
    ]
)


@given(nodes=standings, prefill=st.integers(0, 12), extra=st.integers(-2, 2))
def test_it_comes_to_an_end_and_never_empties_a_role(nodes: list[Standing], prefill: int, extra: int) -> None:
    target = Split(min(prefill, len(nodes)), max(0, len(nodes) - min(prefill, len(nodes)) + extra))
    served = {role for role in Role if any(each.serves and each.role is role for each in nodes)}
    fixed = {each.name for each in nodes if each.fixed}
    standing = {each.name: each for each in nodes}
    for _ in range(len(nodes) + 1):
        wanted = moves(target, standing.values())
        if not wanted:
            break
        for move in wanted:
            assert move.name not in fixed
            was = standing[move.name]
            assert move.to is other(was.role)
            standing[move.name] = Standing(move.name, move.to, serves=was.serves, load=was.load)
    else:
        raise AssertionError("it does not end")
    for role in served:
        assert not target.of(role) or any(each.serves for each in standing.values() if each.role is role)
    if not extra and all(each.serves and not each.fixed for each in nodes) and 0 < target.prefill < len(nodes):
        assert sum(each.role is P for each in standing.values()) == target.prefill


def test_splits_that_are_possible() -> None:
    assert [str(split) for split in possible_splits(4, "disaggregated")] == ["1:3", "2:2", "3:1"]
    assert [str(split) for split in possible_splits(3, "auto")] == ["0:3", "1:2", "2:1"]
    assert [str(split) for split in possible_splits(2, "colocated")] == ["0:2"]
    assert [possible_splits(1, "disaggregated"), possible_splits(0, "auto"), possible_splits(0, "colocated")] == [
        []
    ] * 3
    assert told(possible_splits(4, "disaggregated")) == "1:3, 2:2, 3:1"
    assert told(possible_splits(256, "disaggregated")) == "1:255, 2:254, ..., 255:1"
    assert told([]) == "none"


@pytest.mark.parametrize("text", ["", "3", "3:", ":1", "3:1:0", "-1:2", "a:b", "3.0:1", "٣:١", "9" * 9 + ":1"])
def test_what_is_no_ratio(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not P:D, as in 3:1"):
        parse_split(text)
    assert parse_split("3:1") == Split(3, 1)
