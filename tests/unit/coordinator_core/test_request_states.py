"""Cancel, deadline and the death of a node, in every state a request can be in. A new state fails until it is here."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.errors import Cancelled, DeadlineExceeded
from baton.types import FinishReason, Incarnation, RequestId, Work
from coordinator.core import messages as m
from coordinator.core.record import TERMINAL, RequestState
from tests.unit.coordinator_core.world import DECODE, PREFILL, World


@dataclass
class Scene:
    world: World
    prefill: Incarnation
    decode: Incarnation
    request: RequestId
    ahead: RequestId | None = None  # what it waits for


TIMEOUT = 10.0  # below every patience of the brain


def scene() -> Scene:
    world = World()
    prefill, decode = world.join("p0", PREFILL), world.join("d0", DECODE)
    return Scene(world, prefill, decode, world.submit(timeout=TIMEOUT))


def queued() -> Scene:
    world = World()
    prefill, decode = world.join("p0", PREFILL), world.join("d0", DECODE, max_num_seqs=1)
    ahead = world.submit(timeout=2 * TIMEOUT)
    return Scene(world, prefill, decode, world.submit(timeout=TIMEOUT), ahead)


def reserved() -> Scene:
    it = scene()
    it.world.reserve(it.decode, it.world.key(it.decode), it.prefill)
    return it


def streaming() -> Scene:
    it = reserved()
    key = it.world.key(it.decode)
    it.world.prefill_ended(it.prefill, key)
    it.world.token(it.decode, key, 0)
    return it


def finished() -> Scene:
    it = streaming()
    it.world.token(it.decode, it.world.key(it.decode), 1, finish=FinishReason.STOP)
    return it


def failed() -> Scene:
    it = streaming()
    it.world.cancel(it.request)
    return it


SCENES: dict[RequestState, Callable[[], Scene]] = {
    RequestState.QUEUED: queued,
    RequestState.PLACED: scene,
    RequestState.RESERVED: reserved,
    RequestState.STREAMING: streaming,
    RequestState.FINISHED: finished,
    RequestState.FAILED: failed,
}
# Whose work is to be stopped: a writer whose hand-off has committed has no part in the request any more.
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


def arrange(state: RequestState) -> Scene:
    it = SCENES[state]()
    assert it.world.brain.state(it.request) is (None if state in TERMINAL else state)
    return it


def cancels(it: Scene, effects: list[m.Effect]) -> set[str]:
    names = {it.prefill: "prefill", it.decode: "decode"}
    return {
        names[effect.node]
        for effect in effects
        if isinstance(effect, m.Send) and isinstance(effect.message, m.Cancel) and effect.message.key[0] == it.request
    }


def test_cancel(state: RequestState) -> None:
    it = arrange(state)
    effects = it.world.cancel(it.request, Cancelled("the client has gone away"))
    if state in TERMINAL:
        assert effects == []
    else:
        assert isinstance(it.world.error(it.request), Cancelled)
    assert cancels(it, effects) == LEGS[state]
    assert len(it.world.ends(it.request)) == 1
    assert it.world.cancel(it.request) == []


def test_stop(state: RequestState) -> None:
    """Its client has all that it wants: a good end, whatever the state."""
    it = arrange(state)
    effects = it.world.stop(it.request)
    (end,) = it.world.ends(it.request)
    if state in TERMINAL:
        assert effects == []
    else:
        assert isinstance(end.result, m.Finished)
        assert end.result.reason is FinishReason.STOP
    assert cancels(it, effects) == LEGS[state]
    assert it.world.stop(it.request) == []


def test_deadline(state: RequestState) -> None:
    it = arrange(state)
    assert it.world.advance(TIMEOUT - 0.1) == []
    effects = it.world.advance(0.2)
    if state not in TERMINAL:
        assert isinstance(it.world.error(it.request), DeadlineExceeded)
    assert len(it.world.ends(it.request)) == 1
    assert cancels(it, effects) == LEGS[state]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_node_gone(state: RequestState, victim: str) -> None:
    it = arrange(state)
    tokens = it.world.tokens(it.request)
    dead, other = (it.prefill, it.decode) if victim == "prefill" else (it.decode, it.prefill)
    effects = it.world.gone(dead)
    assert m.Send(other, m.PeerGone(dead)) in effects
    lost = victim in LEGS[state]
    assert cancels(it, effects) == (LEGS[state] - {victim} if lost else set())
    if state in TERMINAL:
        assert len(it.world.ends(it.request)) == 1
        return
    if not lost and LEGS[state]:
        assert it.world.brain.state(it.request) is state
        return
    if victim == "decode":
        assert it.world.brain.state(it.request) is RequestState.QUEUED
    if it.ahead is not None:
        it.world.cancel(it.ahead)
    successor = it.world.join("decode-reborn", DECODE) if victim == "decode" else it.decode
    assert it.world.tokens(it.request) == tokens
    placed = [work for work in works(it, successor) if work.key.request == it.request]
    assert list(placed[-1].emitted) == tokens
    if victim == "prefill":
        assert it.world.sent(it.decode, m.Submit)[-1].writer is None, "decode computes the prompt itself"
    assert it.world.ends(it.request) == []


def works(it: Scene, node: Incarnation) -> list[Work]:
    return [order.work for order in it.world.sent(node, m.Submit) + it.world.sent(node, m.Prefill)]
