"""Requests replayed on a split: single ones by hand, many against the real brain."""

import pytest

from baton.role_split import RoleSplit
from baton.slo import Slo
from benchmarks.scenarios.ratio_workloads import SLO, SWINGING_LOADS, plan_phases
from coordinator.core.estimates.workload import RequestShape
from coordinator.core.ratio.backtest import HISTORY_SECONDS, RESTART_SECONDS, SplitBacktest
from coordinator.core.ratio.split_replay import SplitReplay
from simulator.cost_model_cluster import CostModelCluster
from tests.unit.coordinator.core.ratio.planned_cluster import NODE_PROFILE, SPLITS

PROMPT = RequestShape(500, 1.0)  # a second, and no step after its first token


def test_queued_prompts_count_as_missed_once_late() -> None:
    replay = SplitReplay(RoleSplit(1, 1), NODE_PROFILE, Slo(ttft_seconds=2.5), 0.0)
    for _ in range(5):
        replay.add_request(0.0, PROMPT, 1.0)
    replay.advance_to(2.4)
    assert replay.missed_count == 0
    replay.advance_to(2.6)
    assert replay.missed_count == 3, "two have theirs at 1.01 s and 2.02 s"
    replay.advance_to(60.0)
    assert replay.missed_count == 3


def test_cached_tokens_cost_no_prefill_time() -> None:
    replay = SplitReplay(RoleSplit(1, 1), NODE_PROFILE, Slo(ttft_seconds=0.9), 0.0)
    replay.add_request(0.0, PROMPT, 0.5)
    replay.advance_to(60.0)
    assert replay.missed_count == 0


@pytest.mark.parametrize(("decode", "missed"), [(1, 10), (2, 0)])
def test_decode_nodes_are_shared_evenly(decode: int, missed: int) -> None:
    """Ten at once take steps of 60 ms on one node, and of 50 ms on two."""
    replay = SplitReplay(RoleSplit(10, decode), NODE_PROFILE, Slo(tpot_seconds=0.055), 0.0)
    for _ in range(10):
        replay.add_request(0.0, RequestShape(10, 41.0), 1.0)
    replay.advance_to(60.0)
    assert replay.missed_count == missed


def test_requests_wait_for_decode_slots() -> None:
    replay = SplitReplay(RoleSplit(8, 1), NODE_PROFILE, Slo(ttft_seconds=1.0), 0.0)
    for _ in range(NODE_PROFILE.max_num_seqs + 3):
        replay.add_request(0.0, RequestShape(10, 101.0), 1.0)
    replay.advance_to(60.0)
    assert replay.missed_count == 3


def test_with_split_copies_state_without_changing_original() -> None:
    first = SplitReplay(RoleSplit(4, 4), NODE_PROFILE, Slo(ttft_seconds=2.5), 0.0)
    for _ in range(8):
        first.add_request(0.0, PROMPT, 1.0)
    other = first.with_split(RoleSplit(1, 7))
    first.advance_to(60.0)
    other.advance_to(60.0)
    assert (first.missed_count, other.missed_count) == (0, 6)


@pytest.mark.parametrize("split", [RoleSplit(4, 4), RoleSplit(5, 3), RoleSplit(6, 2)])
def test_replay_agrees_with_real_brain(split: RoleSplit) -> None:
    loads = [(load, 30.0) for load in SWINGING_LOADS]
    cluster = CostModelCluster(split.prefill_nodes, split.decode_nodes)
    cluster.schedule_requests(plan_phases(loads, "replayed"))
    cluster.run(90.0)
    replay = SplitReplay(split, NODE_PROFILE, SLO, 0.0)
    for one in plan_phases(loads, "replayed"):
        replay.add_request(
            one.start_seconds, RequestShape(one.prompt_tokens, float(one.output_tokens)), 1.0
        )
    replay.advance_to(90.0)
    assert 1.0 - replay.missed_count / len(cluster.submitted_requests) == pytest.approx(
        cluster.slo_attainment(SLO), abs=0.1
    )


def replay_requests(
    hindsight: SplitBacktest,
    begin: float,
    end: float,
    asked: list[RequestShape],
    present: RoleSplit,
) -> None:
    """Replay so many requests every second."""
    for second in range(int(begin), int(end)):
        came = [(second + 0.5, one) for one in asked]
        hindsight.add_requests(came, 1.0, NODE_PROFILE, SPLITS, present, second + 1.0)


def test_backtest_counts_misses_per_split_within_history() -> None:
    hindsight, prompts = SplitBacktest(Slo(ttft_seconds=3.0), 0.0), [PROMPT] * 3
    replay_requests(hindsight, 0.0, 60.0, prompts, RoleSplit(4, 4))
    missed = [hindsight.count_missed(split) for split in SPLITS]
    assert missed[3:] == [0, 0, 0, 0]
    assert missed[0] > 60
    assert hindsight.count_saved(RoleSplit(4, 4), RoleSplit(1, 7)) >= 0
    assert (hindsight.count_requests(HISTORY_SECONDS), hindsight.count_requests(10.0)) == (180, 30)
    replay_requests(hindsight, 60.0, 100.0 + HISTORY_SECONDS, [], RoleSplit(4, 4))
    assert [hindsight.count_missed(split) for split in SPLITS] == [0] * len(SPLITS)


def test_overloaded_split_is_restarted_from_current_state() -> None:
    hindsight = SplitBacktest(Slo(ttft_seconds=3.0), 0.0)
    replay_requests(hindsight, 0.0, 200.0, [PROMPT] * 4, RoleSplit(5, 3))
    replay_requests(hindsight, 200.0, 215.0 + RESTART_SECONDS, [], RoleSplit(5, 3))
    replay_requests(
        hindsight, 215.0 + RESTART_SECONDS, 245.0, [RequestShape(5, 1.0)], RoleSplit(5, 3)
    )
    assert hindsight.count_missed(RoleSplit(1, 7), 15.0) == 0


def test_backtest_survives_changing_node_count() -> None:
    hindsight = SplitBacktest(Slo(ttft_seconds=3.0), 0.0)
    replay_requests(hindsight, 0.0, 5.0, [PROMPT], RoleSplit(4, 4))
    seven = [RoleSplit(prefill, 7 - prefill) for prefill in range(1, 7)]
    hindsight.add_requests([(5.5, PROMPT)], 1.0, NODE_PROFILE, seven, RoleSplit(3, 4), 6.0)
    assert hindsight.count_missed(RoleSplit(3, 4)) == 5, "it was not there before: as many as came"
    assert hindsight.count_saved(RoleSplit(3, 4), RoleSplit(4, 4)) == 0


def test_many_requests_limit_replayed_splits() -> None:
    """So that an evaluation has a bounded cost. Of a split that is not replayed, all requests
    count as missed."""
    splits, present = [RoleSplit(number, 20 - number) for number in range(1, 20)], RoleSplit(10, 10)
    for requests, played in ((10, 16), (512, 3)):
        hindsight = SplitBacktest(SLO, 0.0)
        hindsight.add_requests(
            [(1.0, PROMPT)] * requests, 0.001, NODE_PROFILE, splits, present, 60.0
        )
        assert sum(hindsight.count_missed(split) < requests for split in splits) == played
