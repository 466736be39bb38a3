"""The counters of the request table."""

import pytest

from baton.cluster_link.messages import DecodeStarted, PrefillEnded
from baton.errors import (
    BatonError,
    IncompleteTransfer,
    NodeLost,
    NodeStalled,
    OutOfBlocks,
)
from baton.types import FinishReason, Incarnation, NodeName
from coordinator.core.common.effects import FinishedResult, MemberLost
from tests.unit.coordinator.core.brain_harness import BrainHarness, stream_first_token


def test_prompt_tokens_are_counted_once_and_later_attempts_as_recomputed(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    world.send_from_node(p0, PrefillEnded(key, computed_tokens=12, cached_tokens=8))
    world.send_from_node(
        d0, DecodeStarted(key, computed_tokens=0, cached_tokens=0, received_tokens=20)
    )
    world.report_token(d0, key, 0)
    counters = world.brain.counters
    assert {k: v for k, v in counters.prompt_tokens.items() if v} == {
        "computed_prefill": 12,
        "local_cache": 8,
    }
    world.report_failure(d0, key, OutOfBlocks("full"))
    again = world.last_attempt_key(d0)
    world.report_reserved(d0, again, p0)
    world.send_from_node(p0, PrefillEnded(again, computed_tokens=5, cached_tokens=16))
    world.report_token(d0, again, 1, finish=FinishReason.STOP)
    assert sum(counters.prompt_tokens.values()) == 20
    assert counters.recomputed_tokens == {"out_of_blocks": 5}


def test_tokens_of_unreported_attempt_are_not_cache_hits_of_next(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """The first attempt fails before any report; the second finds the blocks that it left."""
    request = world.submit()
    world.report_failure(p0, world.last_attempt_key(p0), OutOfBlocks("full"))
    again = world.last_attempt_key(d0)
    world.report_reserved(d0, again, p0)
    world.send_from_node(p0, PrefillEnded(again, computed_tokens=4, cached_tokens=16))
    world.report_token(d0, again, 0, finish=FinishReason.STOP)
    assert world.end_event(request).result == FinishedResult(FinishReason.STOP, 0)
    assert {k: v for k, v in world.brain.counters.prompt_tokens.items() if v} == {
        "computed_prefill": 20
    }


def test_prefill_report_counts_after_commit(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    """The reports come on two streams in any order; what the prefill node's cache had counts in
    both."""
    request = world.submit()
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    world.send_from_node(
        d0, DecodeStarted(key, computed_tokens=0, cached_tokens=0, received_tokens=20)
    )
    assert world.brain.count_attempts(p0) == 0
    world.send_from_node(p0, PrefillEnded(key, computed_tokens=4, cached_tokens=16))
    world.report_token(d0, key, 0, finish=FinishReason.STOP)
    assert world.end_event(request).result == FinishedResult(FinishReason.STOP, 16)
    counted = {
        source: tokens for source, tokens in world.brain.counters.prompt_tokens.items() if tokens
    }
    assert counted == {"computed_prefill": 4, "local_cache": 16}
    assert not world.brain.counters.dropped_messages


def test_internal_requests_are_counted_separately(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=1, internal=True)
    world.report_prefill_ended(p0, world.last_attempt_key(p0))
    world.report_token(p0, world.last_attempt_key(p0), 0, finish=FinishReason.LENGTH)
    assert world.end_event(request).is_internal
    assert world.brain.counters.requests == {("length", "internal"): 1}
    assert world.brain.counters.generated_tokens == 0
    assert sum(world.brain.counters.prompt_tokens.values()) == 0


def test_handoffs_are_counted_by_outcome(
    world: BrainHarness, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.last_attempt_key(d0)
    world.report_reserved(d0, key, p0)
    world.report_failure(d0, key, IncompleteTransfer("two slabs are missing"))
    key = stream_first_token(world, p0, d0)
    world.report_handed_off(p0, key)
    world.report_handed_off(p0, key)  # a repeated message counts once
    assert world.brain.counters.handoffs == {("incomplete", "shm"): 1, ("committed", "shm"): 1}
    assert world.brain.counters.handoff_bytes == {"shm": 10}


@pytest.mark.parametrize("error", [NodeLost("x"), NodeStalled("x")])
def test_lost_nodes_are_reported_as_effects(
    world: BrainHarness, p0: Incarnation, d0: Incarnation, error: BatonError
) -> None:
    effects = world.brain.remove_member(d0, error, world.now)
    assert MemberLost(d0, NodeName("d0"), error) in effects
    assert world.brain.counters.lost_nodes == {error.code: 1}
