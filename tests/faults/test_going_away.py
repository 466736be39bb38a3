"""The client goes away: in every state of a request, through every door. Compute stops and every block comes back."""

import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from coordinator.core.record import RequestState
from tests.faults.scene import Asked, Scene, call
from tests.history import Door, Failed

HOLD = 0.5  # seconds
LONG = 600  # tokens: half a minute of decoding, if nobody stops it
SLOWLY = "decode.step.before=delay(0.05)"
UNSEEN = itertools.count(1000)  # a prompt that decode holds already is not handed over
Caught = Callable[[Scene, Door], Awaitable[Asked]]


async def queued(scene: Scene, door: Door) -> Asked:
    """Behind two prompts that fill the prefill node's window."""
    await scene.cluster.arm("prefill", "prefill.layer.before=delay(0.2)")
    for _ in range(2):
        scene.ask(call(Door.GRPC_ONCE, 900, 2, salt=next(UNSEEN)))
    await scene.until_placed(2)
    asked = scene.ask(call(door, 300, LONG, salt=next(UNSEEN)))
    await scene.until_queued()
    return asked


async def placed(scene: Scene, door: Door) -> Asked:
    """Decode has not answered yet."""
    await scene.cluster.arm("decode", f"decode.allocate.before=delay({HOLD})*1;{SLOWLY}")
    asked = scene.ask(call(door, 100, LONG, salt=next(UNSEEN)))
    await scene.until_placed()
    return asked


async def reserved(scene: Scene, door: Door) -> Asked:
    """Decode has set blocks aside, and prefill is at its first layer. Whoever was seen too late leaves, and another
    asks."""
    while True:
        await scene.cluster.arm("prefill", f"prefill.layer.before=delay({HOLD})*1")
        asked = scene.ask(call(door, 100, LONG, salt=next(UNSEEN)))
        if not (await scene.until_blocks("reserved", "writing", "in_use")).in_use:
            return asked
        await asked.leave()
        await scene.at_rest()


async def streaming(scene: Scene, door: Door) -> Asked:
    asked = scene.ask(call(door, 100, LONG, salt=next(UNSEEN)))
    if door.streams:
        await scene.until_tokens(asked, 3)
    else:
        await scene.until_blocks("in_use")
    return asked


async def finished(scene: Scene, door: Door) -> Asked:
    """At the very moment of the last token."""
    asked = scene.ask(call(door, 100, 3, salt=next(UNSEEN)))
    await scene.until_tokens(asked, 3)
    return asked


async def failed(scene: Scene, door: Door) -> Asked:
    """Its deadline has just passed."""
    await scene.cluster.arm("prefill", f"prefill.layer.before=delay({HOLD})*1")
    asked = scene.ask(call(door, 100, LONG, salt=next(UNSEEN), timeout=0.3))
    await scene.until("an end", lambda: asked.operation.end)
    assert isinstance(asked.operation.end, Failed)
    assert asked.operation.end.code == "DEADLINE_EXCEEDED"
    return asked


CATCH: dict[RequestState, Caught] = {
    RequestState.QUEUED: queued,
    RequestState.PLACED: placed,
    RequestState.RESERVED: reserved,
    RequestState.STREAMING: streaming,
    RequestState.FINISHED: finished,
    RequestState.FAILED: failed,
}


def test_every_state_is_covered() -> None:
    assert set(CATCH) == set(RequestState)


def cases() -> Iterator[Any]:
    """Every state through every door; half of them, and so that every state and every door has its turn, by default."""
    for (row, state), (column, door) in itertools.product(enumerate(RequestState), enumerate(Door)):
        marks = [pytest.mark.thorough] if (row + column) % 2 else []
        yield pytest.param(state, door, marks=marks, id=f"{state.value}-{door.value}")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("state", "door"), list(cases()))
async def test_going_away(scene: Scene, state: RequestState, door: Door) -> None:
    generated = await scene.counter("baton_generated_tokens_total")
    await scene.cluster.arm("decode", SLOWLY)
    asked = await CATCH[state](scene, door)
    await asked.leave()
    await scene.cluster.arm("", "")
    await scene.at_rest()
    assert await scene.counter("baton_generated_tokens_total") - generated < LONG // 2
