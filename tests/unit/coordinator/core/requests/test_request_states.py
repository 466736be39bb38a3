"""Cancellation, deadline and loss of a node in every state of a request; a new state must be
added here."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PeerLostNotice, PrefillOrder
from baton.errors import Cancelled, DeadlineExceeded
from baton.types import AttemptSpec, FinishReason, Incarnation, RequestId
from coordinator.core.common.effects import Effect, FinishedResult, SendOrder
from coordinator.core.requests.record import TERMINAL_STATES, RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


@dataclass
class RequestInState:
    world: BrainHarness
    prefill: Incarnation
    decode: Incarnation
    request: RequestId
    request_ahead: RequestId | None = None  # what it waits for


TIMEOUT = 10.0  # below every patience of the brain


def scene() -> RequestInState:
    world = BrainHarness()
    prefill, decode = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    return RequestInState(world, prefill, decode, world.submit(timeout=TIMEOUT))


def queued() -> RequestInState:
    world = BrainHarness()
    prefill, decode = world.join_node("p0", PREFILL), world.join_node("d0", DECODE, max_num_seqs=1)
    ahead = world.submit(timeout=2 * TIMEOUT)
    return RequestInState(world, prefill, decode, world.submit(timeout=TIMEOUT), ahead)


def reserved() -> RequestInState:
    it = scene()
    it.world.report_reserved(it.decode, it.world.last_attempt_key(it.decode), it.prefill)
    return it


def streaming() -> RequestInState:
    it = reserved()
    key = it.world.last_attempt_key(it.decode)
    it.world.report_prefill_ended(it.prefill, key)
    it.world.report_token(it.decode, key, 0)
    return it


def finished() -> RequestInState:
    it = streaming()
    it.world.report_token(
        it.decode, it.world.last_attempt_key(it.decode), 1, finish=FinishReason.STOP
    )
    return it


def failed() -> RequestInState:
    it = streaming()
    it.world.cancel(it.request)
    return it


SCENES: dict[RequestState, Callable[[], RequestInState]] = {
    RequestState.QUEUED: queued,
    RequestState.PLACED: scene,
    RequestState.RESERVED: reserved,
    RequestState.STREAMING: streaming,
    RequestState.FINISHED: finished,
    RequestState.FAILED: failed,
}
# Whose work is to be stopped: a writer whose hand-off has committed has no part in the request any
# more.
LEGS: dict[RequestState, frozenset[str]] = {
    RequestState.QUEUED: frozenset(),
    RequestState.PLACED: frozenset({"prefill", "decode"}),
    RequestState.RESERVED: frozenset({"prefill", "decode"}),
    RequestState.STREAMING: frozenset({"decode"}),
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@pytest.fixture(params=list(RequestState), ids=lambda state: state.value)
def state(request: pytest.FixtureRequest) -> RequestState:
    found: RequestState = request.param
    return found


def arrange(state: RequestState) -> RequestInState:
    it = SCENES[state]()
    assert it.world.brain.get_request_state(it.request) is (
        None if state in TERMINAL_STATES else state
    )
    return it


def cancels(it: RequestInState, effects: list[Effect]) -> set[str]:
    names = {it.prefill: "prefill", it.decode: "decode"}
    return {
        names[effect.incarnation]
        for effect in effects
        if isinstance(effect, SendOrder)
        and isinstance(effect.order, CancelOrder)
        and effect.order.key[0] == it.request
    }


def test_cancelled_request_ends_in_every_state(state: RequestState) -> None:
    it = arrange(state)
    effects = it.world.cancel(it.request, Cancelled("the client has gone away"))
    if state in TERMINAL_STATES:
        assert effects == []
    else:
        assert isinstance(it.world.end_error(it.request), Cancelled)
    assert cancels(it, effects) == LEGS[state]
    assert len(it.world.end_events(it.request)) == 1
    assert it.world.cancel(it.request) == []


def test_stopped_request_ends_successfully_in_every_state(state: RequestState) -> None:
    """The client needs no more: the request ends successfully in any state."""
    it = arrange(state)
    effects = it.world.stop(it.request)
    (end,) = it.world.end_events(it.request)
    if state in TERMINAL_STATES:
        assert effects == []
    else:
        assert isinstance(end.result, FinishedResult)
        assert end.result.reason is FinishReason.STOP
    assert cancels(it, effects) == LEGS[state]
    assert it.world.stop(it.request) == []


def test_deadline_ends_the_request_in_every_state(state: RequestState) -> None:
    it = arrange(state)
    assert it.world.advance(TIMEOUT - 0.1) == []
    effects = it.world.advance(0.2)
    if state not in TERMINAL_STATES:
        assert isinstance(it.world.end_error(it.request), DeadlineExceeded)
    assert len(it.world.end_events(it.request)) == 1
    assert cancels(it, effects) == LEGS[state]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_node_loss_in_every_state_of_a_request(state: RequestState, victim: str) -> None:
    it = arrange(state)
    tokens = it.world.emitted_tokens(it.request)
    dead, other = (it.prefill, it.decode) if victim == "prefill" else (it.decode, it.prefill)
    effects = it.world.lose_node(dead)
    assert SendOrder(other, PeerLostNotice(dead)) in effects
    lost = victim in LEGS[state]
    assert cancels(it, effects) == (LEGS[state] - {victim} if lost else set())
    if state in TERMINAL_STATES:
        assert len(it.world.end_events(it.request)) == 1
        return
    if not lost and LEGS[state]:
        assert it.world.brain.get_request_state(it.request) is state
        return
    if victim == "decode":
        assert it.world.brain.get_request_state(it.request) is RequestState.QUEUED
    if it.request_ahead is not None:
        it.world.cancel(it.request_ahead)
    successor = it.world.join_node("decode-reborn", DECODE) if victim == "decode" else it.decode
    assert it.world.emitted_tokens(it.request) == tokens
    placed = [work for work in works(it, successor) if work.key.request_id == it.request]
    assert list(placed[-1].emitted_token_ids) == tokens
    if victim == "prefill":
        assert it.world.messages_to(it.decode, DecodeOrder)[-1].kv_writer is None, (
            "decode computes the prompt itself"
        )
    assert it.world.end_events(it.request) == []


def works(it: RequestInState, node: Incarnation) -> list[AttemptSpec]:
    return [
        order.work
        for order in it.world.messages_to(node, DecodeOrder)
        + it.world.messages_to(node, PrefillOrder)
    ]
