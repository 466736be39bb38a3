"""What the request table takes in, what waits there, and who computes it in each mode."""

import pytest

from baton.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    TooLong,
    Unavailable,
)
from baton.types import DEFAULT_STANDING, FinishReason, Incarnation
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import DECODE, PREFILL, World, stream_one


def test_too_long_is_refused_with_nothing_allocated(world: World, p0: Incarnation, d0: Incarnation) -> None:
    with pytest.raises(TooLong, match=r"7 after a prompt of 250: together the limit is 256 \(raise --max-model-len"):
        world.submit(prompt=250, max_tokens=7)
    assert world.brain.active() == []
    assert world.brain.counters.rejected == {("context_length_exceeded", "default"): 1}


def test_the_cache_is_the_limit(world: World, p0: Incarnation) -> None:
    world.join("d1", DECODE, num_blocks=4)
    with pytest.raises(TooLong, match=r"the limit is 64 .*: raise --kv-memory"):
        world.submit(prompt=64, max_tokens=1)


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(max_queue=2)
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE, max_num_seqs=1)
    world.submit()
    for _ in range(4):  # one a second leaves the queue
        world.submit()
        world.now += 1.0
        world.cancel(world.key(d0).request)
    world.submit()
    world.submit()
    with pytest.raises(Overloaded, match="2 requests are waiting, the limit is 2") as caught:
        world.submit()
    assert caught.value.retry_after == pytest.approx(2.0, abs=1.0)


def test_waiting_prompts_are_bounded_in_tokens() -> None:
    world = World(max_queue=64, max_queue_tokens=100)
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE, max_num_seqs=1)
    world.submit()
    for _ in range(2):
        world.submit(prompt=40)
    assert world.brain.queued_tokens == 80
    with pytest.raises(
        Overloaded, match=r"80 prompt tokens are waiting, 21 more .* the limit is 100 .*max-queue-tokens"
    ):
        world.submit(prompt=21)
    with pytest.raises(Overloaded, match="80 prompt tokens are waiting"):
        world.submit_all(world.arrival(prompt=11), world.arrival(prompt=10))
    world.submit(prompt=20)
    with pytest.raises(Overloaded, match="100 prompt tokens are waiting"):
        world.brain.require_admission(DEFAULT_STANDING, 1, 60.0, world.now)
    for _ in range(4):
        world.cancel(world.key(d0).request)
    assert world.brain.queued_tokens == 0
    world.submit(prompt=20)


def test_a_prompt_beyond_the_bound_is_let_in_when_nobody_waits() -> None:
    world = World(max_queue_tokens=10)
    world.join("p0", PREFILL)
    world.join("d0", DECODE)
    world.submit(prompt=20)


def test_without_nodes_ever_nothing_is_taken(world: World) -> None:
    with pytest.raises(Unavailable):
        world.submit()


def test_new_requests_wait_a_second_for_a_decode_node(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.gone(d0)
    lost, saved = world.submit(), None
    world.advance(0.6)
    saved = world.submit()
    world.advance(0.5)
    error = world.error(lost)
    assert isinstance(error, Unavailable)
    assert error.retry_after == 1.0
    assert "no decode node" in error.message
    world.join("new", DECODE)
    assert world.brain.state(saved) is RequestState.PLACED
    admitted = [effect.request for effect in world.effects if isinstance(effect, m.Admit)]
    assert admitted == [saved]


def test_admitted_requests_wait_for_nodes_until_their_deadline(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(timeout=20.0)
    world.gone(d0)
    world.gone(p0)
    world.advance(19.9)
    assert world.ends(request) == []
    world.advance(0.2)
    assert isinstance(world.error(request), DeadlineExceeded)


def test_draining_refuses_the_new_and_finishes_the_old(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=2)
    world.brain.drain()
    with pytest.raises(Draining):
        world.submit()
    key = stream_one(world, p0, d0)
    world.token(d0, key, 1, finish=FinishReason.LENGTH)
    assert isinstance(world.end(request).result, m.Finished)


# modes


def test_colocated_needs_no_prefill_node() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    request = world.submit(max_tokens=1)
    (submit,) = world.sent(d0, m.Submit)
    assert submit.writer is None
    world.token(d0, submit.work.key, 0, finish=FinishReason.LENGTH)
    assert isinstance(world.end(request).result, m.Finished)


def test_a_colocated_prompt_may_take_its_time() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    request = world.submit()
    world.advance(40.0)
    assert world.key(d0) == (request, 1, 0)
    assert world.brain.state(request) is RequestState.PLACED


def test_auto_uses_prefill_nodes_while_there_are_any() -> None:
    world = World(mode="auto")
    d0 = world.join("d0", DECODE)
    world.submit()
    assert world.sent(d0, m.Submit)[-1].writer is None
    p0 = world.join("p0", PREFILL)
    world.submit()
    assert world.sent(d0, m.Submit)[-1].writer.incarnation == p0
