"""Further choices of one prompt: they wait for the first, and then need no prefill."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    Preempted,
    TooLong,
    Unavailable,
)
from baton.types import AttemptKey, FinishReason, Incarnation, RequestId
from coordinator.core import messages as m
from coordinator.core.queue import MAX_BYPASS, WaitingQueue
from coordinator.core.record import RequestState
from tests.unit.coordinator_core.world import DECODE, PREFILL, World


def family(world: World, count: int = 3, **fields: Any) -> list[RequestId]:
    first = world.submit(**fields)
    return [first, *(world.submit(after=first, choice=choice, **fields) for choice in range(1, count))]


def requests_of(world: World, node: Incarnation, kind: type[Any]) -> list[RequestId]:
    return [order.work.key.request for order in world.sent(node, kind)]


def commit(world: World, prefill: Incarnation, decode: Incarnation) -> AttemptKey:
    key = world.key(prefill)
    world.reserve(decode, key, prefill)
    world.say(decode, m.Admitted(key, 0, 0, 20))
    return key


def first_token(world: World, prefill: Incarnation, decode: Incarnation) -> None:
    world.token(decode, world.key(decode), 0)


def admitted(world: World, prefill: Incarnation, decode: Incarnation) -> None:
    world.say(decode, m.Admitted(world.key(decode), 0, 0, 20))


def handed_off(world: World, prefill: Incarnation, decode: Incarnation) -> None:
    world.handed_off(prefill, world.key(prefill))


@pytest.mark.parametrize("word", [first_token, admitted, handed_off])
def test_the_prompt_is_computed_once(
    world: World, p0: Incarnation, d0: Incarnation, word: Callable[[World, Incarnation, Incarnation], None]
) -> None:
    one, two, three = family(world)
    world.reserve(d0, world.key(d0), p0)
    world.prefill_ended(p0, world.key(p0))
    assert requests_of(world, d0, m.Submit) == [one]
    assert world.brain.queued == 2
    word(world, p0, d0)
    assert requests_of(world, d0, m.Submit) == [one, two, three]
    assert [order.writer for order in world.sent(d0, m.Submit)][1:] == [None, None]
    assert [order.work.key.choice for order in world.sent(d0, m.Submit)] == [0, 1, 2]
    assert requests_of(world, p0, m.Prefill) == [one]
    for request in (two, three):
        assert world.brain.state(request) is RequestState.PLACED


def test_prompt_tokens_have_one_source_each(world: World, p0: Incarnation, d0: Incarnation) -> None:
    family(world)
    world.prefill_ended(p0, world.key(p0))
    commit(world, p0, d0)
    for submit in world.sent(d0, m.Submit)[1:]:
        world.say(d0, m.Admitted(submit.work.key, 1, 19, 0))
    counted = world.brain.counters.prompt_tokens
    assert counted == {"computed_prefill": 20, "computed_decode": 2, "local_cache": 38, "pool": 0, "remote_pool": 0}


def test_one_that_comes_later_goes_to_the_same_node_at_once(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.join("d1", DECODE)
    first = world.submit()
    decode = next(node for node in world.brain.registry.nodes if world.sent(node, m.Submit))
    world.reserve(decode, world.key(decode), p0)
    world.token(decode, world.key(decode), 0)
    second = world.submit(after=first, choice=1)
    assert requests_of(world, decode, m.Submit) == [first, second]
    assert world.sent(decode, m.Submit)[1].writer is None


@pytest.mark.parametrize("fields", [{"prompt": 19}, {"cache_salt": b"other"}, {"prompt_logprobs": 0}])
def test_who_cannot_share_does_not_wait(world: World, p0: Incarnation, d0: Incarnation, fields: dict[str, Any]) -> None:
    first = world.submit()
    second = world.submit(after=first, **fields)
    assert requests_of(world, p0, m.Prefill) == [first, second]


def test_after_nobody_is_like_any_other(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(after=RequestId("gone"))
    assert requests_of(world, p0, m.Prefill) == [request]


def test_the_end_of_the_first_releases_the_others(world: World, p0: Incarnation, d0: Incarnation) -> None:
    one, two, three = family(world, max_tokens=1)
    world.token(p0, world.key(p0), 0, finish=FinishReason.LENGTH)
    assert requests_of(world, p0, m.Prefill) == [one, two, three]
    assert world.sent(d0, m.Submit) == []


@pytest.mark.parametrize("error", [Cancelled("the client has gone away"), InvalidRequest("bad")])
def test_the_failure_of_the_first_releases_the_others(
    world: World, p0: Incarnation, d0: Incarnation, error: Cancelled | InvalidRequest
) -> None:
    one, two, three = family(world)
    world.cancel(one, error)
    assert requests_of(world, p0, m.Prefill) == [one, two, three]
    assert world.ends(two) == []


def test_they_wait_while_the_first_is_placed_again(world: World, p0: Incarnation, d0: Incarnation) -> None:
    one, two = family(world, 2)
    world.fail(d0, world.key(d0), LeaseExpired("late"))
    assert requests_of(world, p0, m.Prefill) == [one, one]
    commit(world, p0, d0)
    assert requests_of(world, d0, m.Submit) == [one, one, two]


def refuses(world: World, node: Incarnation, key: AttemptKey) -> None:
    world.say(node, m.Refused(key, 2, 32))
    world.beat(node)


def preempts(world: World, node: Incarnation, key: AttemptKey) -> None:
    world.fail(node, key, Preempted("no room"))
    world.beat(node)


def fails(world: World, node: Incarnation, key: AttemptKey) -> None:
    world.fail(node, key, LeaseExpired("late"))


def dies(world: World, node: Incarnation, key: AttemptKey) -> None:
    world.gone(node)
    world.join("d1", DECODE)


@pytest.mark.parametrize("trouble", [refuses, preempts, fails, dies])
def test_a_node_that_does_not_take_it_gets_it_with_prefill_or_not_at_all(
    world: World, p0: Incarnation, d0: Incarnation, trouble: Callable[[World, Incarnation, AttemptKey], None]
) -> None:
    one, two = family(world, 2)
    commit(world, p0, d0)
    world.cancel(one)
    trouble(world, d0, world.key(d0))
    assert requests_of(world, p0, m.Prefill) == [one, two]
    assert world.sent(p0, m.Prefill)[-1].work.key == (two, 2, 1)


def test_a_full_node_sends_it_elsewhere(world: World, p0: Incarnation) -> None:
    d0 = world.join("d0", DECODE, max_num_seqs=1)
    one, two = family(world, 2)
    commit(world, p0, d0)
    assert world.brain.queued == 1, "it waits for room there, or anywhere"
    d1 = world.join("d1", DECODE)
    assert requests_of(world, d1, m.Submit) == [two]
    assert requests_of(world, p0, m.Prefill) == [one, two]


def test_room_on_the_first_ones_node_is_worth_waiting_for_if_there_is_no_other(world: World, p0: Incarnation) -> None:
    d0 = world.join("d0", DECODE, max_num_seqs=1)
    one, two = family(world, 2)
    key = commit(world, p0, d0)
    world.token(d0, key, 0, finish=FinishReason.STOP)
    assert requests_of(world, d0, m.Submit) == [one, two]
    assert requests_of(world, p0, m.Prefill) == [one]


def test_nobody_waits_for_those_that_wait(world: World, p0: Incarnation, d0: Incarnation) -> None:
    one, *_ = family(world, 3)
    stranger = world.submit(prompt=10)
    assert requests_of(world, p0, m.Prefill) == [one, stranger]


def test_they_keep_their_place_in_line(world: World, p0: Incarnation) -> None:
    """Of two families and one between them, whose members are there before the next family comes."""
    d0 = world.join("d0", DECODE, max_num_seqs=1)
    ahead = world.submit(prompt=5)
    one, two = family(world, 2)
    three, four = family(world, 2, prompt=30)
    world.cancel(ahead)
    commit(world, p0, d0)
    assert requests_of(world, d0, m.Submit) == [ahead, one]
    world.cancel(one)
    assert requests_of(world, d0, m.Submit) == [ahead, one, two]
    world.cancel(two)
    assert requests_of(world, d0, m.Submit)[-1] == three
    world.cancel(three)
    assert requests_of(world, d0, m.Submit)[-1] == four


def test_colocated_choices_share_their_node() -> None:
    world = World(mode="colocated")
    nodes = [world.join(name, DECODE) for name in ("d0", "d1")]
    one, two = family(world, 2)
    (decode,) = [node for node in nodes if world.sent(node, m.Submit)]
    assert requests_of(world, decode, m.Submit) == [one]
    world.say(decode, m.Admitted(world.key(decode), 20, 0, 0))
    assert requests_of(world, decode, m.Submit) == [one, two]


def test_who_waits_may_be_cancelled(world: World, p0: Incarnation, d0: Incarnation) -> None:
    _, two, three = family(world)
    world.cancel(two)
    assert isinstance(world.error(two), Cancelled)
    commit(world, p0, d0)
    assert requests_of(world, d0, m.Submit)[1:] == [three]
    assert world.cancel(two) == []


def test_who_waits_has_a_deadline(world: World, p0: Incarnation, d0: Incarnation) -> None:
    first = world.submit(timeout=20.0)
    second = world.submit(after=first, timeout=10.0)
    world.advance(10.0)
    assert isinstance(world.error(second), DeadlineExceeded)
    assert world.ends(first) == []


def test_who_waits_outlives_its_nodes(world: World, p0: Incarnation, d0: Incarnation) -> None:
    one, two = family(world, 2)
    world.gone(d0)
    world.gone(p0)
    p1, d1 = world.join("p1", PREFILL), world.join("d1", DECODE)
    assert requests_of(world, p1, m.Prefill) == [one]
    commit(world, p1, d1)
    assert requests_of(world, d1, m.Submit) == [one, two]


def test_who_waits_is_finished_while_draining(world: World, p0: Incarnation, d0: Incarnation) -> None:
    _, two = family(world, 2)
    world.brain.drain()
    with pytest.raises(Draining):
        world.submit()
    commit(world, p0, d0)
    assert requests_of(world, d0, m.Submit)[-1] == two


def test_without_nodes_all_are_refused_together(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.gone(d0)
    requests = family(world)
    world.advance(1.0)
    for request in requests:
        assert isinstance(world.error(request), Unavailable)
    assert world.brain.queued == 0


def test_all_or_none_come_in(world: World, p0: Incarnation, d0: Incarnation) -> None:
    first = world.submit()
    for _ in range(6):
        world.submit(after=first)
    arrivals = [world.arrival() for _ in range(3)]
    with pytest.raises(Overloaded, match="6 requests are waiting, 3 more would come, the limit is 8"):
        world.submit_all(*arrivals)
    assert len(world.brain.active()) == 7
    world.submit_all(*arrivals[:2])
    assert len(world.brain.active()) == 9
    with pytest.raises(InvalidRequest, match=r"9 outputs .* the limit is 8"):
        world.submit_all(*(world.arrival() for _ in range(9)))


def test_one_that_does_not_fit_keeps_all_out(world: World, p0: Incarnation, d0: Incarnation) -> None:
    with pytest.raises(TooLong):
        world.submit_all(world.arrival(), world.arrival(max_tokens=10_000))
    assert world.brain.active() == []
    assert world.effects == []


def test_who_is_held_is_not_passed_over() -> None:
    queue = WaitingQueue()
    held, *others = [RequestId(f"r{number}") for number in range(MAX_BYPASS + 3)]
    for request in (held, *others):
        queue.push(request)
    queue.hold(held)
    for request in others[:-1]:
        assert queue.candidates()[0] == request
        queue.take(request, 0.0)
    assert (len(queue), queue.candidates()) == (2, others[-1:])
    queue.release(held)
    assert queue.candidates() == [held, others[-1]]
