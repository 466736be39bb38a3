"""A node's way to another role, on the brain's bench with honest nodes."""

import pytest

from baton.errors import InvalidRequest
from baton.types import NodeName, Role
from coordinator.core import messages as m
from coordinator.core.drains import Service
from coordinator.core.flip import ORDER_PATIENCE, PROBE_REST, Phase
from coordinator.core.switches import BARE_PATIENCE, MOST_AT_ONCE
from tests.unit.coordinator_core.crew import Crew

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def crew() -> Crew:
    return Crew("p0", "p1", "d0", "d1")


def outcomes(crew: Crew) -> list[tuple[str, str]]:
    return [(str(report.node), report.outcome) for report in crew.world.brain.switches.over]


def service(crew: Crew, name: str) -> Service:
    return crew.world.brain.service(crew.world.brain.node_called(NodeName(name)))


def probes(crew: Crew) -> list[m.End]:
    ends = [effect for effect in crew.world.effects if isinstance(effect, m.End)]
    return [end for end in ends if end.request.startswith("probe-")]


def test_drained_ordered_probed_and_in_service(crew: Crew) -> None:
    first, second = crew.submit(max_tokens=3), crew.submit(max_tokens=6)
    busy = {name: crew.attempts(name) for name in ("d0", "d1")}
    assert busy == {"d0": 1, "d1": 1}
    crew.step()
    crew.step()  # the first is over, wherever it was
    empty = next(name for name in ("d0", "d1") if not crew.attempts(name))
    crew.ratio(3, 1)
    assert crew.phases() == {empty: Phase.ORDERED}
    assert (service(crew, empty), crew.members[empty].ordered) == (Service.SWITCHING, P)
    crew.advance(0.3)
    crew.switch(empty)
    assert (crew.phases(), crew.in_service(P)) == ({empty: Phase.PROBING}, {"p0", "p1"})
    [probe] = [request for request in crew.world.brain.active() if request.startswith("probe-")]
    told = crew.world.brain.explain(probe, crew.world.now)
    assert (told.warm_up, [attempt.prefill_node for attempt in told.attempts]) == (True, [empty])
    crew.advance(0.2)
    crew.step()
    assert (crew.phases(), crew.in_service(P)) == ({}, {"p0", "p1", empty})
    [report] = crew.world.brain.switches.over
    assert (report.outcome, report.generation) == ("done", 1)
    assert (report.drain, report.switch, report.probe) == pytest.approx((0.0, 0.3, 0.2))
    assert crew.world.brain.counters.nodes_lost == {}, "who joins anew as it was told is not lost"
    assert crew.world.brain.switches.settled
    crew.settle()
    for request in (first, second):
        assert isinstance(crew.world.end(request).result, m.Finished)
    assert crew.world.brain.counters.replaced == {}


def test_who_has_work_gets_time_and_then_the_rest_is_placed_again(crew: Crew) -> None:
    requests = [crew.submit(max_tokens=100) for _ in range(4)]
    crew.ratio(3, 1, patience=5.0)
    [leaving] = crew.phases()
    assert (crew.phases(), crew.attempts(leaving)) == ({leaving: Phase.DRAINING}, 2)
    crew.advance(4.9)
    assert crew.attempts(leaving) == 2
    crew.advance(0.1)
    stays = "d0" if leaving == "d1" else "d1"
    assert (crew.attempts(leaving), crew.attempts(stays)) == (0, 4)
    assert (crew.phases(), crew.world.brain.counters.replaced) == ({leaving: Phase.ORDERED}, {"drained": 2})
    crew.settle()
    assert all(len(crew.world.tokens(request)) == 100 for request in requests)


def test_all_that_are_needed_go_at_once_and_the_last_stays(crew: Crew) -> None:
    crew = Crew("p0", "d0", "d1", "d2", "d3")
    crew.ratio(4, 1)
    assert set(crew.phases().values()) == {Phase.ORDERED}
    assert len(crew.phases()) == 3
    assert len(crew.in_service(D)) == 1
    crew.settle()
    assert len(crew.in_service(P)) == 4


def test_no_more_at_once_than_the_books_hold() -> None:
    crew = Crew("p0", *(f"d{number}" for number in range(MOST_AT_ONCE + 3)))
    crew.ratio(MOST_AT_ONCE + 3, 1)
    assert len(crew.phases()) == MOST_AT_ONCE
    crew.settle()
    assert len(crew.in_service(P)) == MOST_AT_ONCE + 3


@pytest.mark.parametrize(
    ("mode", "split", "possible"),
    [
        ("disaggregated", (4, 0), "1:3, 2:2, 3:1"),
        ("disaggregated", (3, 2), "1:3, 2:2, 3:1"),
        ("auto", (4, 0), "0:4, 1:3, 2:2, 3:1"),
        ("colocated", (2, 2), "0:4"),
    ],
)
def test_what_cannot_be_is_named(mode: str, split: tuple[int, int], possible: str) -> None:
    crew = Crew("p0", "p1", "d0", "d1", mode=mode)
    with pytest.raises(InvalidRequest, match=f"with 4 live nodes in mode {mode}: possible are {possible}$"):
        crew.ratio(*split)
    assert (crew.world.brain.switches.target, crew.phases()) == (None, {})


def test_a_later_target_calls_back_who_is_still_draining(crew: Crew) -> None:
    for _ in range(4):
        crew.submit(max_tokens=100)
    crew.ratio(3, 1)
    [leaving] = crew.phases()
    crew.ratio(2, 2)
    assert (crew.phases(), outcomes(crew)) == ({}, [(leaving, "recalled")])
    assert service(crew, leaving) is Service.IN
    assert (crew.attempts(leaving), crew.world.brain.counters.replaced) == (2, {})
    assert crew.world.brain.switches.settled


def test_a_later_target_turns_round_who_is_being_probed(crew: Crew) -> None:
    crew.ratio(3, 1)
    [moving] = crew.phases()
    crew.switch(moving)
    assert crew.phases() == {moving: Phase.PROBING}
    crew.ratio(2, 2)
    assert (crew.phases(), outcomes(crew)) == ({moving: Phase.ORDERED}, [(moving, "superseded")])
    assert len(probes(crew)) == 1
    crew.settle()
    assert (crew.in_service(D), outcomes(crew)[1:]) == ({"d0", "d1"}, [(moving, "done")])


def test_who_was_told_already_is_turned_round_when_it_comes(crew: Crew) -> None:
    crew.ratio(3, 1)
    [moving] = crew.phases()
    crew.ratio(2, 2)
    assert crew.phases() == {moving: Phase.ORDERED}
    crew.settle()
    assert outcomes(crew) == [(moving, "superseded"), (moving, "done")]


@pytest.mark.parametrize("phase", list(Phase))
def test_a_node_that_dies_comes_back_as_it_was_and_is_switched_again(crew: Crew, phase: Phase) -> None:
    requests = [crew.submit(max_tokens=100) for _ in range(2)]
    crew.ratio(3, 1, patience=0.0 if phase is not Phase.DRAINING else 5.0)
    [moving] = crew.phases()
    crew.advance(0.0)
    if phase in (Phase.PROBING, Phase.RESTING):
        crew.switch(moving)
    if phase is Phase.RESTING:
        crew.fail_probe(moving)
    assert crew.phases() == {moving: phase}
    crew.die(moving)
    if phase is not Phase.ORDERED:
        assert outcomes(crew) == [(moving, "lost")]
    crew.join(moving, D)
    assert outcomes(crew) == [(moving, "lost")]
    assert service(crew, moving) is Service.IN
    crew.settle()
    assert (len(crew.in_service(P)), outcomes(crew)[-1][1]) == (3, "done")
    assert all(len(crew.world.tokens(request)) == 100 for request in requests)


def test_a_node_that_does_not_switch_is_given_up(crew: Crew) -> None:
    crew.ratio(3, 1)
    [moving] = crew.phases()
    crew.advance(ORDER_PATIENCE - 0.1)
    assert crew.phases() == {moving: Phase.ORDERED}
    crew.advance(0.1)
    assert crew.world.brain.registry.called(NodeName(moving)) is None
    assert outcomes(crew) == [(moving, "lost")]
    assert crew.world.brain.counters.nodes_lost == {"stalled": 1}
    del crew.members[moving]
    crew.join(moving, D)
    crew.settle()
    assert len(crew.in_service(P)) == 3


def test_one_that_never_comes_back_is_not_waited_for(crew: Crew) -> None:
    crew.ratio(3, 1)
    [moving] = crew.phases()
    crew.die(moving)
    assert not crew.world.brain.switches.settled
    crew.advance(ORDER_PATIENCE)
    assert (crew.phases(), outcomes(crew)) == ({}, [(moving, "lost")])
    with pytest.raises(InvalidRequest, match="with 3 live nodes"):
        crew.ratio(2, 2)
    crew.ratio(2, 1)
    assert crew.world.brain.switches.settled


def test_a_probe_that_fails_is_sent_again_and_the_node_does_not_serve_before(crew: Crew) -> None:
    crew.ratio(1, 3)
    [moving] = crew.phases()
    for number in (1, 2, 3):
        crew.switch(moving) if number == 1 else crew.advance(PROBE_REST)
        assert crew.world.key(crew.members[moving].incarnation).request.startswith("probe-")
        if number < 3:
            crew.fail_probe(moving, "bad cable")
            assert crew.phases() == {moving: Phase.RESTING}
            [flip] = crew.world.brain.switches.flips.values()
            assert flip.detail == f"probe {number} failed: bad cable"
    assert moving not in crew.in_service(D)
    crew.step()
    assert moving in crew.in_service(D)
    assert [type(end.result).__name__ for end in probes(crew)] == ["HandoffFailed", "HandoffFailed", "Finished"]
    assert crew.world.brain.counters.requests[("length", "internal")] == 1


def test_a_node_that_joins_the_cluster_moves_nobody(crew: Crew) -> None:
    crew.ratio(2, 2)
    crew.join("d2")
    assert (crew.phases(), crew.world.brain.switches.settled) == ({}, False)
    crew.ratio(3, 2)
    crew.settle()
    assert len(crew.in_service(P)) == 3


def test_when_the_other_dies_who_is_leaving_is_called_back(crew: Crew) -> None:
    for _ in range(4):
        crew.submit(max_tokens=100)
    crew.ratio(3, 1)
    [leaving] = crew.phases()
    stays = "d0" if leaving == "d1" else "d1"
    crew.die(stays)
    assert (crew.phases(), crew.in_service(D)) == ({}, {leaving})
    crew.join(stays, D)
    crew.settle()
    assert len(crew.in_service(P)) == 3


@pytest.mark.parametrize("far", [False, True], ids=["ordered", "probing"])
def test_a_role_that_nobody_has_is_taken_by_who_can_be_spared(crew: Crew, far: bool) -> None:
    crew.ratio(3, 1)
    [moving] = crew.phases()
    dead = "d0" if moving == "d1" else "d1"
    if far:
        crew.switch(moving)
    crew.die(dead)
    if not far:
        crew.switch(moving)
    crew.advance(BARE_PATIENCE - 0.1)
    assert crew.in_service(D) == set()
    assert crew.world.brain.next_due() == pytest.approx(crew.world.now + 0.1)
    crew.advance(0.1)
    assert len([flip for flip in crew.world.brain.switches.flips.values() if flip.to is D]) == 1
    for _ in range(5):
        for name in [name for name, member in crew.members.items() if member.ordered]:
            crew.switch(name)
        crew.advance(0.5)
        crew.step()
    assert (len(crew.in_service(P)), len(crew.in_service(D))) == (2, 1)
    crew.join(dead, D)
    crew.settle()
    assert (len(crew.in_service(P)), len(crew.in_service(D))) == (3, 1)


def test_a_new_prefill_node_is_probed_alone_where_decode_has_no_room(crew: Crew) -> None:
    for _ in range(8):
        crew.submit(max_tokens=100)
    crew.ratio(3, 1, patience=0.0)
    crew.advance(0.0)
    [moving] = crew.phases()
    crew.switch(moving)
    assert moving in crew.in_service(P), "it does not wait for an answer to end"
    (probe,) = crew.world.sent(crew.members[moving].incarnation, m.Prefill)[:1]
    assert probe.alone


def test_what_an_operator_drains_stays_drained(crew: Crew) -> None:
    crew.world.effects += crew.world.brain.drain_node(NodeName("d0"), None, crew.world.now)
    crew.ratio(3, 1)
    assert crew.phases() == {"d0": Phase.ORDERED}, "the last in service stays"
    crew.settle()
    assert (crew.in_service(P), crew.in_service(D)) == ({"p0", "p1"}, {"d1"})
    crew.world.effects += crew.world.brain.undrain_node(NodeName("d0"), crew.world.now)
    assert crew.in_service(P) == {"p0", "p1", "d0"}


def test_the_only_decode_node_may_be_one_that_is_probed() -> None:
    crew = Crew("p0", "p1", "d0")
    crew.ratio(1, 2)
    [moving] = crew.phases()
    crew.die("d0")
    crew.switch(moving)
    crew.step()
    assert crew.in_service(D) == {moving}


def test_colocated_probes_need_no_prefill() -> None:
    crew = Crew("p0", "d0", mode="auto")
    crew.ratio(0, 2)
    assert crew.phases() == {"p0": Phase.ORDERED}
    crew.settle()
    assert crew.in_service(D) == {"p0", "d0"}
    crew.ratio(1, 1)
    [moving] = crew.phases()
    crew.switch(moving)
    me = crew.members[moving].incarnation
    assert len(crew.world.sent(me, m.Prefill)) == 1, "a prefill node is probed as one, though none serves"
    crew.settle()
    assert len(crew.in_service(P)) == 1
