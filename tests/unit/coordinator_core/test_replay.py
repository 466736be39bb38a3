"""Requests played through a split: single ones by hand, many against the real brain."""

import pytest

from baton.ratio import Split
from baton.slo import Slo
from benchmarks.ratio_workloads import SLO, SWINGING, phases
from coordinator.core.hindsight import ANEW, LONG, Hindsight
from coordinator.core.replay import Replay
from coordinator.core.workload import Asked
from tests.split_cluster import SplitCluster
from tests.unit.coordinator_core.steered import MACHINE, SPLITS

PROMPT = Asked(500, 1.0)  # a second, and no step after its first token


def test_prompts_wait_for_a_node_and_count_as_soon_as_they_are_late() -> None:
    replay = Replay(Split(1, 1), MACHINE, Slo(ttft=2.5), 0.0)
    for _ in range(5):
        replay.ask(0.0, PROMPT, 1.0)
    replay.advance(2.4)
    assert replay.missed == 0
    replay.advance(2.6)
    assert replay.missed == 3, "two have theirs at 1.01 s and 2.02 s"
    replay.advance(60.0)
    assert replay.missed == 3


def test_what_a_cache_has_takes_no_time() -> None:
    replay = Replay(Split(1, 1), MACHINE, Slo(ttft=0.9), 0.0)
    replay.ask(0.0, PROMPT, 0.5)
    replay.advance(60.0)
    assert replay.missed == 0


@pytest.mark.parametrize(("decode", "missed"), [(1, 10), (2, 0)])
def test_answers_share_the_decode_nodes(decode: int, missed: int) -> None:
    """Ten at once are steps of 60 ms on one node, and of 50 ms on two."""
    replay = Replay(Split(10, decode), MACHINE, Slo(tpot=0.055), 0.0)
    for _ in range(10):
        replay.ask(0.0, Asked(10, 41.0), 1.0)
    replay.advance(60.0)
    assert replay.missed == missed


def test_places_of_decode_nodes_are_waited_for() -> None:
    replay = Replay(Split(8, 1), MACHINE, Slo(ttft=1.0), 0.0)
    for _ in range(MACHINE.slots + 3):
        replay.ask(0.0, Asked(10, 101.0), 1.0)
    replay.advance(60.0)
    assert replay.missed == 3


def test_another_split_takes_over_what_is_there_and_leaves_the_first_as_it_was() -> None:
    first = Replay(Split(4, 4), MACHINE, Slo(ttft=2.5), 0.0)
    for _ in range(8):
        first.ask(0.0, PROMPT, 1.0)
    other = first.onto(Split(1, 7))
    first.advance(60.0)
    other.advance(60.0)
    assert (first.missed, other.missed) == (0, 6)


@pytest.mark.parametrize("split", [Split(4, 4), Split(5, 3), Split(6, 2)])
def test_it_comes_to_what_the_brain_comes_to(split: Split) -> None:
    loads = [(load, 30.0) for load in SWINGING]
    cluster = SplitCluster(split.prefill, split.decode)
    cluster.load(phases(loads, "replayed"))
    cluster.run(90.0)
    replay = Replay(split, MACHINE, SLO, 0.0)
    for one in phases(loads, "replayed"):
        replay.ask(one.at, Asked(one.prompt_tokens, float(one.output_tokens)), 1.0)
    replay.advance(90.0)
    assert 1.0 - replay.missed / len(cluster.seen) == pytest.approx(cluster.share(SLO), abs=0.1)


def told(hindsight: Hindsight, begin: float, end: float, asked: list[Asked], present: Split) -> None:
    """So many every second."""
    for second in range(int(begin), int(end)):
        came = [(second + 0.5, one) for one in asked]
        hindsight.add(came, 1.0, MACHINE, SPLITS, present, second + 1.0)


def test_hindsight_counts_what_each_split_would_have_missed_and_forgets() -> None:
    hindsight, prompts = Hindsight(Slo(ttft=3.0), 0.0), [PROMPT] * 3
    told(hindsight, 0.0, 60.0, prompts, Split(4, 4))
    missed = [hindsight.missed(split) for split in SPLITS]
    assert missed[3:] == [0, 0, 0, 0]
    assert missed[0] > 60
    assert hindsight.saved(Split(4, 4), Split(1, 7)) >= 0
    assert (hindsight.asked(LONG), hindsight.asked(10.0)) == (180, 30)
    told(hindsight, 60.0, 100.0 + LONG, [], Split(4, 4))
    assert [hindsight.missed(split) for split in SPLITS] == [0] * len(SPLITS)


def test_a_line_from_before_does_not_tell_against_a_split_that_is_chosen_now() -> None:
    hindsight = Hindsight(Slo(ttft=3.0), 0.0)
    told(hindsight, 0.0, 200.0, [PROMPT] * 4, Split(5, 3))
    told(hindsight, 200.0, 215.0 + ANEW, [], Split(5, 3))
    told(hindsight, 215.0 + ANEW, 245.0, [Asked(5, 1.0)], Split(5, 3))
    assert hindsight.missed(Split(1, 7), 15.0) == 0


def test_nodes_that_come_and_go_are_no_error() -> None:
    hindsight = Hindsight(Slo(ttft=3.0), 0.0)
    told(hindsight, 0.0, 5.0, [PROMPT], Split(4, 4))
    seven = [Split(prefill, 7 - prefill) for prefill in range(1, 7)]
    hindsight.add([(5.5, PROMPT)], 1.0, MACHINE, seven, Split(3, 4), 6.0)
    assert hindsight.missed(Split(3, 4)) == 5, "it was not there before: as many as came"
    assert hindsight.saved(Split(3, 4), Split(4, 4)) == 0
