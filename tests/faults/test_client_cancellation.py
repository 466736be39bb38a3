"""A client disconnects in each state of a request, over each API: compute stops and every block
is released."""

import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from coordinator.core.requests.record import RequestState
from tests.faults.observed_cluster import ObservedCluster, PendingCall, make_call
from tests.history import ClientApi, Failed

HOLD_SECONDS = 0.5  # seconds
LONG_OUTPUT = 600  # tokens: half a minute of decoding, if nobody stops it
SLOW_DECODE = "decode.step.before=delay(0.05)"
UNSEEN_SALTS = itertools.count(1000)  # a prompt that decode holds already is not handed over
StateCatcher = Callable[[ObservedCluster, ClientApi], Awaitable[PendingCall]]


async def queued(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    """The request waits behind two prompts that fill the prefill node's window."""
    await observed.cluster.arm_failpoints("prefill", "prefill.layer.before=delay(0.2)")
    for _ in range(2):
        observed.start_call(make_call(ClientApi.GRPC_ONCE, 900, 2, salt=next(UNSEEN_SALTS)))
    await observed.wait_placed(2)
    asked = observed.start_call(make_call(door, 300, LONG_OUTPUT, salt=next(UNSEEN_SALTS)))
    await observed.wait_queued()
    return asked


async def placed(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    """The request is placed, and the decode node has not answered yet."""
    await observed.cluster.arm_failpoints(
        "decode", f"decode.allocate.before=delay({HOLD_SECONDS})*1;{SLOW_DECODE}"
    )
    asked = observed.start_call(make_call(door, 100, LONG_OUTPUT, salt=next(UNSEEN_SALTS)))
    await observed.wait_placed()
    return asked


async def reserved(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    """The decode node has reserved blocks, and prefill is at its first layer. A request that was
    observed too late is cancelled, and another is sent."""
    while True:
        await observed.cluster.arm_failpoints(
            "prefill", f"prefill.layer.before=delay({HOLD_SECONDS})*1"
        )
        asked = observed.start_call(make_call(door, 100, LONG_OUTPUT, salt=next(UNSEEN_SALTS)))
        if not (await observed.wait_blocks("reserved", "writing", "in_use")).in_use:
            return asked
        await asked.cancel_call()
        await observed.wait_idle()


async def streaming(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    asked = observed.start_call(make_call(door, 100, LONG_OUTPUT, salt=next(UNSEEN_SALTS)))
    if door.is_streaming:
        await observed.wait_tokens(asked, 3)
    else:
        await observed.wait_blocks("in_use")
    return asked


async def finished(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    """The last token has just been sent."""
    asked = observed.start_call(make_call(door, 100, 3, salt=next(UNSEEN_SALTS)))
    await observed.wait_tokens(asked, 3)
    return asked


async def failed(observed: ObservedCluster, door: ClientApi) -> PendingCall:
    """The deadline of the request has just passed."""
    await observed.cluster.arm_failpoints(
        "prefill", f"prefill.layer.before=delay({HOLD_SECONDS})*1"
    )
    asked = observed.start_call(
        make_call(door, 100, LONG_OUTPUT, salt=next(UNSEEN_SALTS), timeout=0.3)
    )
    await observed.wait_until("an end", lambda: asked.operation.end)
    assert isinstance(asked.operation.end, Failed)
    assert asked.operation.end.code == "DEADLINE_EXCEEDED"
    return asked


CATCHER_BY_STATE: dict[RequestState, StateCatcher] = {
    RequestState.QUEUED: queued,
    RequestState.PLACED: placed,
    RequestState.RESERVED: reserved,
    RequestState.STREAMING: streaming,
    RequestState.FINISHED: finished,
    RequestState.FAILED: failed,
}


def test_every_state_is_covered() -> None:
    assert set(CATCHER_BY_STATE) == set(RequestState)


def list_cases() -> Iterator[Any]:
    """Return every state with every API; by default half of them, in which every state and every
    API occurs."""
    for (row, state), (column, door) in itertools.product(
        enumerate(RequestState), enumerate(ClientApi)
    ):
        marks = [pytest.mark.thorough] if (row + column) % 2 else []
        yield pytest.param(state, door, marks=marks, id=f"{state.value}-{door.value}")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("state", "door"), list(list_cases()))
async def test_client_cancellation_releases_everything(
    observed: ObservedCluster, state: RequestState, door: ClientApi
) -> None:
    generated = await observed.read_counter("baton_generated_tokens_total")
    await observed.cluster.arm_failpoints("decode", SLOW_DECODE)
    asked = await CATCHER_BY_STATE[state](observed, door)
    await asked.cancel_call()
    await observed.cluster.arm_failpoints("", "")
    await observed.wait_idle()
    assert (
        await observed.read_counter("baton_generated_tokens_total") - generated < LONG_OUTPUT // 2
    )
