"""The rules of the request table, one by one."""

import pytest

from baton.errors import (
    Cancelled,
    Incomplete,
    InvalidRequest,
    LeaseExpired,
    OutOfBlocks,
    Unavailable,
)
from baton.types import FinishReason, Incarnation, TokenEvent
from coordinator.core import messages as m
from coordinator.core.record import RequestState
from coordinator.core.settings import LONGEST_REST
from tests.unit.coordinator_core.world import DECODE, PREFILL, World, stream_one, ticket_for


def test_both_legs_are_dispatched_at_once_and_the_ticket_goes_to_the_writer(
    world: World, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit()
    (submit,), (prefill,) = world.sent(d0, m.Submit), world.sent(p0, m.Prefill)
    assert submit.work == prefill.work
    assert submit.writer.incarnation == p0
    assert not prefill.alone
    assert submit.work.request.timeout == 60.0
    key = submit.work.key
    assert key == (request, 1, 0)
    world.reserve(d0, key, p0)
    assert world.sent(p0, m.GiveTicket) == [m.GiveTicket(ticket_for(d0, key, p0))]


def test_the_whole_life(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=3)
    key = stream_one(world, p0, d0)
    world.handed_off(p0, key)
    assert world.brain.placed_on(p0) == 0
    world.say(d0, m.Tokens((TokenEvent(key, 1, 8), TokenEvent(key, 2, 9, FinishReason.LENGTH))))
    assert world.tokens(request) == [7, 8, 9]
    end = world.end(request)
    assert end.result == m.Finished(FinishReason.LENGTH, 0)
    assert end.timeline.handoff.bytes == 10
    assert world.placed() == 0
    assert world.sent(p0, m.Cancel) == []
    assert world.brain.counters.requests == {("length", "default"): 1}
    assert world.brain.timeline(request) == end.timeline


def test_decode_that_needs_no_writer_frees_the_prefill_leg(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    world.reserve(d0, world.key(d0), None)
    assert [cancel.key for cancel in world.sent(p0, m.Cancel)] == [world.key(d0)]
    assert (world.brain.placed_on(p0), world.brain.placed_on(d0)) == (0, 1)


def test_a_first_token_that_ends_the_request_comes_from_prefill(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.token(p0, world.key(p0), 0, finish=FinishReason.STOP)
    assert world.tokens(request) == [7]
    assert world.end(request).result == m.Finished(FinishReason.STOP, 0)
    assert len(world.sent(d0, m.Cancel)) == 1


def test_one_token_needs_no_decode_node(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=1)
    (prefill,) = world.sent(p0, m.Prefill)
    assert prefill.alone
    assert world.sent(d0, m.Submit) == []
    world.token(p0, prefill.work.key, 0, finish=FinishReason.LENGTH)
    assert world.tokens(request) == [7]
    assert world.placed() == 0


def test_who_is_served_before_a_decode_node_is_here_is_admitted(world: World, p0: Incarnation) -> None:
    """Or its client would wait for ever for a word that its request is accepted."""
    request = world.submit(max_tokens=1)
    assert [effect.request for effect in world.effects if isinstance(effect, m.Admit)] == [request]
    world.token(p0, world.key(p0), 0, finish=FinishReason.LENGTH)
    assert isinstance(world.end(request).result, m.Finished)
    other = world.submit(max_tokens=2)
    world.advance(1.0)
    assert isinstance(world.error(other), Unavailable)


def test_the_last_token_of_a_request_placed_again_needs_no_decode_node(
    world: World, p0: Incarnation, d0: Incarnation
) -> None:
    request = world.submit(max_tokens=2)
    key = stream_one(world, p0, d0)
    world.fail(d0, key, LeaseExpired("late"))
    prefill = world.sent(p0, m.Prefill)[-1]
    assert prefill.alone
    assert prefill.work.emitted == (7,)
    world.token(p0, prefill.work.key, 1, token=9, finish=FinishReason.LENGTH)
    assert world.tokens(request) == [7, 9]
    assert isinstance(world.end(request).result, m.Finished)


def test_output_that_is_complete_ends_even_if_no_node_says_so(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=2)
    key = stream_one(world, p0, d0)
    world.token(d0, key, 1)
    assert world.end(request).result == m.Finished(FinishReason.LENGTH, 0)


@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_repeated_or_missing_token_costs_the_attempt_and_nothing_else(
    world: World, p0: Incarnation, d0: Incarnation, index: int
) -> None:
    request = world.submit()
    key = stream_one(world, p0, d0)
    world.token(d0, key, index)
    assert world.tokens(request) == [7]
    again = world.key(d0)
    assert again == (request, 2, 0)
    assert world.sent(d0, m.Submit)[-1].work.emitted == (7,)
    assert world.brain.counters.replaced == {"stale": 1}


def test_tokens_after_the_last_one_change_nothing(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit(max_tokens=8)
    key = stream_one(world, p0, d0)
    late = (TokenEvent(key, 1, 8, FinishReason.STOP), TokenEvent(key, 2, 9))
    world.say(d0, m.Tokens(late))
    assert world.tokens(request) == [7, 8]
    assert isinstance(world.end(request).result, m.Finished)


def test_a_prefill_node_may_not_stream(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.token(p0, world.key(p0), 0)
    assert world.tokens(request) == []
    assert world.brain.counters.replaced == {"stale": 1}


def test_messages_of_another_attempt_or_node_are_dropped(world: World, p0: Incarnation, d0: Incarnation) -> None:
    d1 = world.join("d1", DECODE)
    request = world.submit()
    first = world.key(p0)
    used, spare = (d0, d1) if world.sent(d0, m.Submit) else (d1, d0)
    world.reserve(used, first, p0)
    assert world.token(spare, first, 0) == []
    world.fail(used, first, LeaseExpired("late"))
    assert world.key(p0).attempt == 2
    for message in (
        m.Tokens((TokenEvent(first, 0, 5),)),
        m.Reserved(first, None, 0),
        m.Refused(first, 1, 0),
        m.AttemptFailed(first, InvalidRequest("late")),
        m.Admitted(first, 0, 0, 0),
    ):
        assert world.say(used, message) == []
    assert world.tokens(request) == []
    assert world.brain.state(request) is RequestState.PLACED


def test_an_older_attempt_on_the_same_node_is_not_heard(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    old = world.key(d0)
    world.fail(p0, old, LeaseExpired("late"))
    assert world.key(d0) == (request, 2, 0)
    assert world.token(d0, old, 0) == []
    assert world.reserve(d0, old, p0) == []
    assert world.tokens(request) == []


def test_a_stale_incarnation_is_not_heard(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    key = world.key(d0)
    world.join("d0", DECODE)
    assert world.reserve(d0, key, p0) == []
    assert world.brain.counters.dropped_messages["stale"] == 1


def test_a_ticket_for_somebody_else_is_not_handed_on(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    key = world.key(d0)
    world.say(d0, m.Reserved(key, ticket_for(d0, key, Incarnation("p9#1")), 0))
    assert world.sent(p0, m.GiveTicket) == []
    assert world.brain.counters.replaced == {"stale": 1}


@pytest.mark.parametrize("moment", ["placed", "reserved", "streaming"])
def test_death_of_either_node_places_again_with_what_was_emitted(moment: str) -> None:
    for victim in ("p", "d") if moment != "streaming" else ("d",):
        world = World()
        p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
        request = world.submit()
        key = world.key(d0)
        if moment != "placed":
            world.reserve(d0, key, p0)
        if moment == "streaming":
            world.token(d0, key, 0)
        new = world.join("p1", PREFILL) if victim == "p" else world.join("d1", DECODE)
        world.gone(p0 if victim == "p" else d0)
        work = (world.sent(new, m.Prefill) or world.sent(new, m.Submit))[0].work
        assert list(work.emitted) == world.tokens(request)
        assert work.key.attempt == 2
        assert len(work.request.prompt) == 20


def test_a_report_of_a_hand_off_comes_from_its_writer(world: World, p0: Incarnation, d0: Incarnation) -> None:
    world.submit()
    key = world.key(d0)
    world.handed_off(d0, key)
    assert (world.brain.placed_on(p0), world.brain.placed_on(d0)) == (1, 1)
    assert world.brain.counters.handoffs == {}


@pytest.mark.parametrize("proof", ["admitted", "token", "handed off"])
def test_once_decode_has_committed_the_writer_may_go(
    world: World, p0: Incarnation, d0: Incarnation, proof: str
) -> None:
    request = world.submit()
    key = world.key(d0)
    world.reserve(d0, key, p0)
    if proof == "admitted":
        world.say(d0, m.Admitted(key, 0, 0, 20))
    elif proof == "token":
        world.token(d0, key, 0)
    else:
        world.handed_off(p0, key)
    assert world.brain.placed_on(p0) == 0
    assert world.sent(p0, m.Cancel) == []
    world.fail(p0, key, LeaseExpired("the acknowledgement was lost"))
    world.gone(p0)
    world.token(d0, key, len(world.tokens(request)))
    assert world.brain.counters.replaced == {}
    assert world.tokens(request) in ([7], [7, 7])


def test_a_report_of_a_hand_off_counts_even_after_the_end(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    key = world.key(d0)
    world.reserve(d0, key, p0)
    world.token(d0, key, 0, finish=FinishReason.STOP)
    assert world.sent(p0, m.Cancel) == []
    for _ in range(2):
        world.handed_off(p0, key)
    assert world.brain.counters.handoffs == {("committed", "shm"): 1}
    timeline = world.brain.timeline(request)
    assert timeline is not None
    assert timeline.handoff.bytes == 10


def test_an_error_that_no_attempt_can_mend_ends_the_request(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.fail(p0, world.key(p0), InvalidRequest("token 5 is bad"))
    assert isinstance(world.error(request), InvalidRequest)
    assert len(world.sent(d0, m.Cancel)) == 1


def test_attempts_are_counted_and_the_last_error_is_shown(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    for error in (LeaseExpired("one"), OutOfBlocks("two"), Incomplete("three")):
        assert world.ends(request) == []
        world.fail(d0, world.key(d0), error)
        world.advance(LONGEST_REST)
    assert world.error(request).message == "three"
    assert world.end(request).timeline.attempts == 3
    assert world.placed() == 0


def test_a_request_that_fails_again_and_again_rests() -> None:
    """Or a fault of a second would spend every attempt."""
    world = World(max_attempts=8)
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = world.submit()
    rests = []
    for number in range(7):
        world.fail(d0, world.key(d0), LeaseExpired(f"{number}"))
        began = world.now
        while not world.placed():
            assert world.brain.queued == 1
            world.advance(0.05)
        rests.append(world.now - began)
    assert rests[0] == 0
    assert rests == sorted(rests)
    assert sum(rests) > 4
    assert world.brain.state(request) is RequestState.PLACED


def test_a_request_may_end_while_it_rests(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    for _ in range(2):
        world.fail(d0, world.key(d0), LeaseExpired("again"))
    assert (world.placed(), world.brain.queued) == (0, 1)
    world.cancel(request)
    assert isinstance(world.error(request), Cancelled)
    assert world.brain.queued == 0
    world.advance(LONGEST_REST)
    assert world.placed() == 0


def test_no_node_can_cancel_a_request(world: World, p0: Incarnation, d0: Incarnation) -> None:
    request = world.submit()
    world.fail(d0, world.key(d0), Cancelled("the first token ends the request"))
    assert world.ends(request) == []
    assert world.key(d0).attempt == 2


def test_the_nodes_of_a_failed_attempt_are_avoided(world: World, p0: Incarnation, d0: Incarnation) -> None:
    p1, d1 = world.join("p1", PREFILL), world.join("d1", DECODE)
    world.submit()
    used = [node for node in (p0, p1, d0, d1) if world.brain.placed_on(node)]
    decode = next(node for node in used if node in (d0, d1))
    world.fail(decode, world.key(decode), LeaseExpired("black hole"))
    assert {node for node in (p0, p1, d0, d1) if world.brain.placed_on(node)} == {p0, p1, d0, d1} - set(used)


def test_who_is_placed_again_goes_first_and_the_oldest_before_the_others(world: World, p0: Incarnation) -> None:
    d0 = world.join("d0", DECODE, max_num_seqs=3)
    placed = [world.submit() for _ in range(3)]
    waiting = world.submit()
    assert world.brain.state(waiting) is RequestState.QUEUED
    world.gone(d0)
    d1 = world.join("d1", DECODE)
    assert [order.work.key.request for order in world.sent(d1, m.Submit)] == [*placed, waiting]
