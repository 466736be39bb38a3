"""Room for bodies while they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from baton.errors import Overloaded
from coordinator import arriving_bodies
from coordinator.arriving_bodies import ArrivingBodies, ArrivingBody, BodyRoom


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> BodyRoom:
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 0.01)
    return BodyRoom("bodies", 3, 100)


@pytest.mark.parametrize(("taken", "more"), [([1, 1, 1], 1), ([60, 40], 1), ([60], 41)])
async def test_room_is_bounded_in_number_and_bytes(
    stack: AsyncExitStack, room: BodyRoom, taken: list[int], more: int
) -> None:
    for size in taken:
        await stack.enter_async_context(room.take(size))
    with pytest.raises(Overloaded, match="at most 3 and 100 bytes at once") as caught:
        await stack.enter_async_context(room.take(more))
    assert caught.value.retry_after == 1.0
    assert (len(room), room.bytes) == (len(taken), sum(taken))
    await stack.aclose()
    assert (len(room), room.bytes) == (0, 0)


async def test_who_waits_comes_in_when_there_is_room_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 60.0)
    room, order = BodyRoom("bodies", 1, 100), list[int]()
    gone = asyncio.create_task(_take(room, 0, order))

    async with room.take(1):
        waiting = [asyncio.create_task(_take(room, number, order)) for number in range(1, 4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*waiting, gone, return_exceptions=True)
    assert order == [0, 1, 3]
    assert len(room) == 0


async def _take(room: BodyRoom, number: int, order: list[int]) -> None:
    async with room.take(1):
        order.append(number)


async def test_a_body_that_arrives_for_long_gives_way(
    stack: AsyncExitStack, room: BodyRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [asyncio.create_task(_arrive(room)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(room) == 3
    with pytest.raises(Overloaded):
        await stack.enter_async_context(room.take(1))
    monkeypatch.setattr(arriving_bodies, "DISPLACED_AFTER", 0.0)
    await stack.enter_async_context(room.take(1))
    assert len(room) == 3
    oldest = await slow[0]
    assert oldest.displaced
    assert not any(task.done() for task in slow[1:])
    for task in slow[1:]:
        task.cancel()


async def _arrive(room: BodyRoom) -> ArrivingBody:
    """A body of which nothing more comes."""
    async with room.take(1) as body:
        try:
            async with asyncio.timeout(60.0) as timer:
                body.reading(timer)
                await asyncio.Event().wait()
        except TimeoutError:
            return body
    raise AssertionError("it was not displaced")


async def test_a_complete_body_keeps_its_room(
    stack: AsyncExitStack, room: BodyRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_bodies, "DISPLACED_AFTER", 0.0)
    body = await stack.enter_async_context(room.take(100))
    async with asyncio.timeout(60.0) as timer:
        body.reading(timer)
        await asyncio.sleep(0)
        body.complete()
    with pytest.raises(Overloaded):
        await stack.enter_async_context(room.take(1))


async def test_a_body_of_unknown_length_takes_room_as_it_grows(stack: AsyncExitStack, room: BodyRoom) -> None:
    first, second = [await stack.enter_async_context(room.take(10)) for _ in range(2)]
    first.grow(5)
    first.grow(80)
    assert room.bytes == 90
    with pytest.raises(Overloaded):
        second.grow(21)
    second.grow(20)
    assert room.bytes == 100


async def test_large_bodies_take_no_room_of_small_ones() -> None:
    bodies = ArrivingBodies()
    assert bodies.of_size(1 << 10) is bodies.of_size(64 << 10)
    assert bodies.of_size(None) is bodies.of_size((64 << 10) + 1)
    assert len({id(bodies.of_size(1)), id(bodies.of_size(None)), id(bodies.grpc)}) == 3
