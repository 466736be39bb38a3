"""The phases of a node's role switch, on a brain with nodes that carry out every order."""

import pytest

from baton.cluster_link.messages import PrefillOrder
from baton.errors import InvalidRequest
from baton.types import NodeName, Role
from coordinator.core.common.effects import EndRequest, FinishedResult
from coordinator.core.membership.node_registry import NodeServiceState
from coordinator.core.ratio.role_switch import (
    ORDER_TIMEOUT_SECONDS,
    PROBE_BACKOFF_SECONDS,
    RoleSwitchPhase,
)
from coordinator.core.ratio.role_switcher import MAX_CONCURRENT, UNSTAFFED_SECONDS
from tests.unit.coordinator.core.ratio.manual_cluster import ManualCluster

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def crew() -> ManualCluster:
    return ManualCluster("p0", "p1", "d0", "d1")


def outcomes(crew: ManualCluster) -> list[tuple[str, str]]:
    return [
        (str(report.node), report.outcome) for report in crew.harness.brain.role_switcher.finished
    ]


def service(crew: ManualCluster, name: str) -> NodeServiceState:
    return crew.harness.brain.get_service_state(crew.harness.brain.get_node(NodeName(name)))


def probes(crew: ManualCluster) -> list[EndRequest]:
    ends = [effect for effect in crew.harness.effects if isinstance(effect, EndRequest)]
    return [end for end in ends if end.request_id.startswith("probe-")]


def test_switch_goes_through_all_phases(crew: ManualCluster) -> None:
    first, second = crew.submit_request(max_tokens=3), crew.submit_request(max_tokens=6)
    busy = {name: crew.count_attempts(name) for name in ("d0", "d1")}
    assert busy == {"d0": 1, "d1": 1}
    crew.generate_tokens()
    crew.generate_tokens()  # the first is over, wherever it was
    empty = next(name for name in ("d0", "d1") if not crew.count_attempts(name))
    crew.set_ratio(3, 1)
    assert crew.switch_phases() == {empty: RoleSwitchPhase.ORDERED}
    assert (service(crew, empty), crew.nodes[empty].ordered_role) == (NodeServiceState.SWITCHING, P)
    crew.advance_clock(0.3)
    crew.rejoin_in_ordered_role(empty)
    assert (crew.switch_phases(), crew.names_in_service(P)) == (
        {empty: RoleSwitchPhase.PROBING},
        {"p0", "p1"},
    )
    [probe] = [
        request
        for request in crew.harness.brain.list_active_requests()
        if request.startswith("probe-")
    ]
    told = crew.harness.explain_request(probe)
    assert (told.warm_up, [attempt.prefill_node for attempt in told.attempts]) == (True, [empty])
    crew.advance_clock(0.2)
    crew.generate_tokens()
    assert (crew.switch_phases(), crew.names_in_service(P)) == ({}, {"p0", "p1", empty})
    [report] = crew.harness.brain.role_switcher.finished
    assert (report.outcome, report.generation) == ("done", 1)
    assert (report.drain_seconds, report.switch_seconds, report.probe_seconds) == pytest.approx(
        (0.0, 0.3, 0.2)
    )
    assert crew.harness.brain.counters.lost_nodes == {}, "who joins anew as it was told is not lost"
    assert crew.harness.brain.role_switcher.is_settled
    crew.run_until_settled()
    for request in (first, second):
        assert isinstance(crew.harness.end_event(request).result, FinishedResult)
    assert crew.harness.brain.counters.replaced_attempts == {}


def test_busy_node_drains_then_rest_is_replaced(crew: ManualCluster) -> None:
    requests = [crew.submit_request(max_tokens=100) for _ in range(4)]
    crew.set_ratio(3, 1, patience=5.0)
    [leaving] = crew.switch_phases()
    assert (crew.switch_phases(), crew.count_attempts(leaving)) == (
        {leaving: RoleSwitchPhase.DRAINING},
        2,
    )
    crew.advance_clock(4.9)
    assert crew.count_attempts(leaving) == 2
    crew.advance_clock(0.1)
    stays = "d0" if leaving == "d1" else "d1"
    assert (crew.count_attempts(leaving), crew.count_attempts(stays)) == (0, 4)
    assert (crew.switch_phases(), crew.harness.brain.counters.replaced_attempts) == (
        {leaving: RoleSwitchPhase.ORDERED},
        {"drained": 2},
    )
    crew.run_until_settled()
    assert all(len(crew.harness.emitted_tokens(request)) == 100 for request in requests)


def test_needed_nodes_switch_together_and_last_one_stays(crew: ManualCluster) -> None:
    crew = ManualCluster("p0", "d0", "d1", "d2", "d3")
    crew.set_ratio(4, 1)
    assert set(crew.switch_phases().values()) == {RoleSwitchPhase.ORDERED}
    assert len(crew.switch_phases()) == 3
    assert len(crew.names_in_service(D)) == 1
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == 4


def test_concurrent_switches_are_bounded() -> None:
    crew = ManualCluster("p0", *(f"d{number}" for number in range(MAX_CONCURRENT + 3)))
    crew.set_ratio(MAX_CONCURRENT + 3, 1)
    assert len(crew.switch_phases()) == MAX_CONCURRENT
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == MAX_CONCURRENT + 3


@pytest.mark.parametrize(
    ("mode", "split", "possible"),
    [
        ("disaggregated", (4, 0), "1:3, 2:2, 3:1"),
        ("disaggregated", (3, 2), "1:3, 2:2, 3:1"),
        ("auto", (4, 0), "0:4, 1:3, 2:2, 3:1"),
        ("colocated", (2, 2), "0:4"),
    ],
)
def test_impossible_ratio_is_refused_naming_possible_ones(
    mode: str, split: tuple[int, int], possible: str
) -> None:
    crew = ManualCluster("p0", "p1", "d0", "d1", mode=mode)
    with pytest.raises(
        InvalidRequest, match=f"with 4 live nodes in mode {mode}: possible are {possible}$"
    ):
        crew.set_ratio(*split)
    assert (crew.harness.brain.role_switcher.target_split, crew.switch_phases()) == (None, {})


def test_new_target_recalls_draining_node(crew: ManualCluster) -> None:
    for _ in range(4):
        crew.submit_request(max_tokens=100)
    crew.set_ratio(3, 1)
    [leaving] = crew.switch_phases()
    crew.set_ratio(2, 2)
    assert (crew.switch_phases(), outcomes(crew)) == ({}, [(leaving, "recalled")])
    assert service(crew, leaving) is NodeServiceState.IN_SERVICE
    assert (crew.count_attempts(leaving), crew.harness.brain.counters.replaced_attempts) == (2, {})
    assert crew.harness.brain.role_switcher.is_settled


def test_new_target_reverses_probed_node(crew: ManualCluster) -> None:
    crew.set_ratio(3, 1)
    [moving] = crew.switch_phases()
    crew.rejoin_in_ordered_role(moving)
    assert crew.switch_phases() == {moving: RoleSwitchPhase.PROBING}
    crew.set_ratio(2, 2)
    assert (crew.switch_phases(), outcomes(crew)) == (
        {moving: RoleSwitchPhase.ORDERED},
        [(moving, "superseded")],
    )
    assert len(probes(crew)) == 1
    crew.run_until_settled()
    assert (crew.names_in_service(D), outcomes(crew)[1:]) == ({"d0", "d1"}, [(moving, "done")])


def test_ordered_node_is_reversed_after_it_rejoins(crew: ManualCluster) -> None:
    crew.set_ratio(3, 1)
    [moving] = crew.switch_phases()
    crew.set_ratio(2, 2)
    assert crew.switch_phases() == {moving: RoleSwitchPhase.ORDERED}
    crew.run_until_settled()
    assert outcomes(crew) == [(moving, "superseded"), (moving, "done")]


@pytest.mark.parametrize("phase", list(RoleSwitchPhase))
def test_restarted_node_is_switched_again(crew: ManualCluster, phase: RoleSwitchPhase) -> None:
    requests = [crew.submit_request(max_tokens=100) for _ in range(2)]
    crew.set_ratio(3, 1, patience=0.0 if phase is not RoleSwitchPhase.DRAINING else 5.0)
    [moving] = crew.switch_phases()
    crew.advance_clock(0.0)
    if phase in (RoleSwitchPhase.PROBING, RoleSwitchPhase.RESTING):
        crew.rejoin_in_ordered_role(moving)
    if phase is RoleSwitchPhase.RESTING:
        crew.fail_probe(moving)
    assert crew.switch_phases() == {moving: phase}
    crew.kill_node(moving)
    if phase is not RoleSwitchPhase.ORDERED:
        assert outcomes(crew) == [(moving, "lost")]
    crew.start_node(moving, D)
    assert outcomes(crew) == [(moving, "lost")]
    assert service(crew, moving) is NodeServiceState.IN_SERVICE
    crew.run_until_settled()
    assert (len(crew.names_in_service(P)), outcomes(crew)[-1][1]) == (3, "done")
    assert all(len(crew.harness.emitted_tokens(request)) == 100 for request in requests)


def test_node_that_ignores_role_order_is_dropped(crew: ManualCluster) -> None:
    crew.set_ratio(3, 1)
    [moving] = crew.switch_phases()
    crew.advance_clock(ORDER_TIMEOUT_SECONDS - 0.1)
    assert crew.switch_phases() == {moving: RoleSwitchPhase.ORDERED}
    crew.advance_clock(0.1)
    assert crew.harness.brain.node_registry.by_name(NodeName(moving)) is None
    assert outcomes(crew) == [(moving, "lost")]
    assert crew.harness.brain.counters.lost_nodes == {"stalled": 1}
    del crew.nodes[moving]
    crew.start_node(moving, D)
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == 3


def test_node_that_never_rejoins_is_not_awaited(crew: ManualCluster) -> None:
    crew.set_ratio(3, 1)
    [moving] = crew.switch_phases()
    crew.kill_node(moving)
    assert not crew.harness.brain.role_switcher.is_settled
    crew.advance_clock(ORDER_TIMEOUT_SECONDS)
    assert (crew.switch_phases(), outcomes(crew)) == ({}, [(moving, "lost")])
    with pytest.raises(InvalidRequest, match="with 3 live nodes"):
        crew.set_ratio(2, 2)
    crew.set_ratio(2, 1)
    assert crew.harness.brain.role_switcher.is_settled


def test_failed_probe_is_retried_before_service(crew: ManualCluster) -> None:
    crew.set_ratio(1, 3)
    [moving] = crew.switch_phases()
    for number in (1, 2, 3):
        crew.rejoin_in_ordered_role(moving) if number == 1 else crew.advance_clock(
            PROBE_BACKOFF_SECONDS
        )
        assert crew.harness.last_attempt_key(crew.nodes[moving].incarnation).request_id.startswith(
            "probe-"
        )
        if number < 3:
            crew.fail_probe(moving, "bad cable")
            assert crew.switch_phases() == {moving: RoleSwitchPhase.RESTING}
            [flip] = crew.harness.brain.role_switcher.pending.values()
            assert flip.detail == f"probe {number} failed: bad cable"
    assert moving not in crew.names_in_service(D)
    crew.generate_tokens()
    assert moving in crew.names_in_service(D)
    assert [type(end.result).__name__ for end in probes(crew)] == [
        "HandoffFailed",
        "HandoffFailed",
        "FinishedResult",
    ]
    assert crew.harness.brain.counters.requests[("length", "internal")] == 1


def test_joining_node_causes_no_switch(crew: ManualCluster) -> None:
    crew.set_ratio(2, 2)
    crew.start_node("d2")
    assert (crew.switch_phases(), crew.harness.brain.role_switcher.is_settled) == ({}, False)
    crew.set_ratio(3, 2)
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == 3


def test_draining_node_is_recalled_when_last_peer_dies(crew: ManualCluster) -> None:
    for _ in range(4):
        crew.submit_request(max_tokens=100)
    crew.set_ratio(3, 1)
    [leaving] = crew.switch_phases()
    stays = "d0" if leaving == "d1" else "d1"
    crew.kill_node(stays)
    assert (crew.switch_phases(), crew.names_in_service(D)) == ({}, {leaving})
    crew.start_node(stays, D)
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == 3


@pytest.mark.parametrize("far", [False, True], ids=["ordered", "probing"])
def test_unstaffed_role_is_taken_by_spare_node(crew: ManualCluster, far: bool) -> None:
    crew.set_ratio(3, 1)
    [moving] = crew.switch_phases()
    dead = "d0" if moving == "d1" else "d1"
    if far:
        crew.rejoin_in_ordered_role(moving)
    crew.kill_node(dead)
    if not far:
        crew.rejoin_in_ordered_role(moving)
    crew.advance_clock(UNSTAFFED_SECONDS - 0.1)
    assert crew.names_in_service(D) == set()
    assert crew.harness.brain.next_tick_at() == pytest.approx(crew.harness.now + 0.1)
    crew.advance_clock(0.1)
    assert (
        len(
            [
                flip
                for flip in crew.harness.brain.role_switcher.pending.values()
                if flip.target_role is D
            ]
        )
        == 1
    )
    for _ in range(5):
        for name in [name for name, member in crew.nodes.items() if member.ordered_role]:
            crew.rejoin_in_ordered_role(name)
        crew.advance_clock(0.5)
        crew.generate_tokens()
    assert (len(crew.names_in_service(P)), len(crew.names_in_service(D))) == (2, 1)
    crew.start_node(dead, D)
    crew.run_until_settled()
    assert (len(crew.names_in_service(P)), len(crew.names_in_service(D))) == (3, 1)


def test_prefill_probe_skips_handoff_when_decode_is_full(crew: ManualCluster) -> None:
    for _ in range(8):
        crew.submit_request(max_tokens=100)
    crew.set_ratio(3, 1, patience=0.0)
    crew.advance_clock(0.0)
    [moving] = crew.switch_phases()
    crew.rejoin_in_ordered_role(moving)
    assert moving in crew.names_in_service(P), "it does not wait for an answer to end"
    (probe,) = crew.harness.messages_to(crew.nodes[moving].incarnation, PrefillOrder)[:1]
    assert probe.needs_no_decode


def test_operator_drain_survives_switch(crew: ManualCluster) -> None:
    crew.harness.effects += crew.harness.brain.drain_node(NodeName("d0"), None, crew.harness.now)
    crew.set_ratio(3, 1)
    assert crew.switch_phases() == {"d0": RoleSwitchPhase.ORDERED}, "the last in service stays"
    crew.run_until_settled()
    assert (crew.names_in_service(P), crew.names_in_service(D)) == ({"p0", "p1"}, {"d1"})
    crew.harness.effects += crew.harness.brain.undrain_node(NodeName("d0"), crew.harness.now)
    assert crew.names_in_service(P) == {"p0", "p1", "d0"}


def test_only_decode_node_can_be_probed() -> None:
    crew = ManualCluster("p0", "p1", "d0")
    crew.set_ratio(1, 2)
    [moving] = crew.switch_phases()
    crew.kill_node("d0")
    crew.rejoin_in_ordered_role(moving)
    crew.generate_tokens()
    assert crew.names_in_service(D) == {moving}


def test_colocated_probe_needs_no_prefill_node() -> None:
    crew = ManualCluster("p0", "d0", mode="auto")
    crew.set_ratio(0, 2)
    assert crew.switch_phases() == {"p0": RoleSwitchPhase.ORDERED}
    crew.run_until_settled()
    assert crew.names_in_service(D) == {"p0", "d0"}
    crew.set_ratio(1, 1)
    [moving] = crew.switch_phases()
    crew.rejoin_in_ordered_role(moving)
    me = crew.nodes[moving].incarnation
    assert len(crew.harness.messages_to(me, PrefillOrder)) == 1, (
        "a prefill node is probed as one, though none serves"
    )
    crew.run_until_settled()
    assert len(crew.names_in_service(P)) == 1
