"""What the request table counts."""

import pytest

from baton.errors import (
    BatonError,
    Incomplete,
    NodeGone,
    OutOfBlocks,
    Stalled,
)
from baton.types import FinishReason, Incarnation, NodeName
from coordinator.core import messages as m
from tests.unit.coordinator_core.world import World, stream_one


def test_prompt_tokens_are_counted_once_and_the_rest_is_recomputed(
    world: World, p0: Incarnation, d0: Incarnation
) -> None:
    world.submit()
    key = world.key(d0)
    world.reserve(d0, key, p0)
    world.say(p0, m.PrefillEnded(key, computed_tokens=12, cached_tokens=8))
    world.say(d0, m.Admitted(key, computed_tokens=0, cached_tokens=0, received_tokens=20))
    world.token(d0, key, 0)
    counters = world.brain.counters
    assert {k: v for k, v in counters.prompt_tokens.items() if v} == {"computed_prefill": 12, "local_cache": 8}
    world.fail(d0, key, OutOfBlocks("full"))
    again = world.key(d0)
    world.reserve(d0, again, p0)
    world.say(p0, m.PrefillEnded(again, computed_tokens=5, cached_tokens=16))
    world.token(d0, again, 1, finish=FinishReason.STOP)
    assert sum(counters.prompt_tokens.values()) == 20
    assert counters.recomputed_tokens == {"out_of_blocks": 5}


def test_what_an_attempt_without_a_report_computed_is_no_hit_of_the_next(
    world: World, p0: Incarnation, d0: Incarnation
) -> None:
    """The first attempt fails before anybody has reported; the second finds the blocks that it left behind."""
    request = world.submit()
    world.fail(p0, world.key(p0), OutOfBlocks("full"))
    again = world.key(d0)
    world.reserve(d0, again, p0)
    world.say(p0, m.PrefillEnded(again, computed_tokens=4, cached_tokens=16))
    world.token(d0, again, 0, finish=FinishReason.STOP)
    assert world.end(request).result == m.Finished(FinishReason.STOP, 0)
    assert {k: v for k, v in world.brain.counters.prompt_tokens.items() if v} == {"computed_prefill": 20}


def test_prefill_is_heard_out_behind_the_news_of_the_commit(world: World, p0: Incarnation, d0: Incarnation) -> None:
    """They come on two streams: what prefill's cache had counts, whichever is the faster."""
    request = world.submit()
    key = world.key(d0)
    world.reserve(d0, key, p0)
    world.say(d0, m.Admitted(key, computed_tokens=0, cached_tokens=0, received_tokens=20))
    assert world.brain.placed_on(p0) == 0
    world.say(p0, m.PrefillEnded(key, computed_tokens=4, cached_tokens=16))
    world.token(d0, key, 0, finish=FinishReason.STOP)
    assert world.end(request).result == m.Finished(FinishReason.STOP, 16)
    counted = {source: tokens for source, tokens in world.brain.counters.prompt_tokens.items() if tokens}
    assert counted == {"computed_prefill": 4, "local_cache": 16}
    assert not world.brain.counters.dropped_messages


def test_internal_requests_are_counted_apart(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=1, internal=True)
    world.prefill_ended(p0, world.key(p0))
    world.token(p0, world.key(p0), 0, finish=FinishReason.LENGTH)
    assert world.end(request).internal
    assert world.brain.counters.requests == {("length", "internal"): 1}
    assert world.brain.counters.generated_tokens == 0
    assert sum(world.brain.counters.prompt_tokens.values()) == 0


def test_hand_offs_are_counted_by_outcome(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    key = world.key(d0)
    world.reserve(d0, key, p0)
    world.fail(d0, key, Incomplete("two slabs are missing"))
    key = stream_one(world, p0, d0)
    world.handed_off(p0, key)
    world.handed_off(p0, key)  # a repeated message counts once
    assert world.brain.counters.handoffs == {("incomplete", "shm"): 1, ("committed", "shm"): 1}
    assert world.brain.counters.handoff_bytes == {"shm": 10}


@pytest.mark.parametrize("error", [NodeGone("x"), Stalled("x")])
def test_lost_nodes_are_named_to_the_shell(world: World, p0: Incarnation, d0: Incarnation, error: BatonError) -> None:
    effects = world.brain.node_gone(d0, error, world.now)
    assert m.Lost(d0, NodeName("d0"), error) in effects
    assert world.brain.counters.nodes_lost == {error.code: 1}
