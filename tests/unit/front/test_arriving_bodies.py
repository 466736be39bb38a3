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
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 60.0)
    monkeypatch.setattr(arriving_bodies, "DISPLACED_AFTER", 60.0)
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


async def _arrive(room: BodyRoom, size: int = 1, owner: str = "") -> ArrivingBody:
    """A body of which nothing more comes."""
    async with room.take(size, owner) as body:
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
    await first.grow(5)
    await first.grow(80)
    assert room.bytes == 90
    with pytest.raises(Overloaded):
        await second.grow(21)
    await second.grow(20)
    assert room.bytes == 100


async def test_a_body_that_grows_waits_for_room_and_goes_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 60.0)
    room, order = BodyRoom("bodies", 9, 100), list[int]()

    async def grow(body: ArrivingBody) -> None:
        await body.grow(80)
        order.append(0)

    async with room.take(20) as body:
        async with room.take(80):
            tasks = [asyncio.create_task(_take(room, 1, order)), asyncio.create_task(grow(body))]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks)
    assert order == [0, 1]
    assert (len(room), room.bytes) == (0, 0)


async def test_a_body_that_stalls_gives_way_to_one_that_grows(room: BodyRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = asyncio.create_task(_arrive(room, 80))
    await asyncio.sleep(0)
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 0.0)
    async with room.take(20) as body:
        await body.grow(100)
        assert room.bytes == 100
    assert (await stalled).displaced


async def test_bodies_that_stall_give_way_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes, ends or runs out of patience meanwhile."""
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 600.0)
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 600.0)
    monkeypatch.setattr(arriving_bodies, "DISPLACED_AFTER", 600.0)
    room, order = BodyRoom("bodies", 2, 100), list[int]()
    stalled = [asyncio.create_task(_arrive(room)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(_take(room, number, order)) for number in range(2)]
    await asyncio.sleep(0)
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 0.0)
    await asyncio.gather(*waiting)
    assert order == [0, 1]
    assert (await stalled[0]).displaced
    for task in stalled:
        task.cancel()


async def test_one_owner_has_so_many_and_those_that_wait_keep_no_other_owner_out(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 600.0)
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 600.0)
    monkeypatch.setattr(arriving_bodies, "DISPLACED_AFTER", 600.0)
    room = BodyRoom("bodies", 3, 100, per_owner=2)
    greedy = [asyncio.create_task(_arrive(room, 1, "greedy")) for _ in range(50)]
    await asyncio.sleep(0)
    assert len(room) == 2
    await stack.enter_async_context(room.take(1, "other"))
    later = [asyncio.create_task(stack.enter_async_context(room.take(1, owner))) for owner in ("greedy", "new")]
    await asyncio.sleep(0)
    assert len(room) == 3
    greedy[0].cancel()
    await later[1]  # who has fewest comes first, though others have waited longer
    assert not later[0].done()
    for task in [*greedy, *later]:
        task.cancel()
    await asyncio.wait([*greedy, *later])


async def test_an_owner_with_all_it_may_have_waits_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving_bodies, "PATIENCE", 600.0)
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 600.0)
    room, order = BodyRoom("bodies", 9, 100, per_owner=1), list[int]()
    stalled = asyncio.create_task(_arrive(room))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(_take(room, 0, order))
    await asyncio.sleep(0)
    assert order == []
    monkeypatch.setattr(arriving_bodies, "STALLED_AFTER", 0.0)
    await waiting
    assert (await stalled).displaced


async def test_there_is_room_for_bodies_on_half_of_the_connections() -> None:
    bodies = ArrivingBodies(8)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(bodies.of_size(1).take(1))
        late = asyncio.create_task(stack.enter_async_context(bodies.of_size(1).take(1)))
        await asyncio.sleep(0)
        assert len(bodies.of_size(1)) == 4
        late.cancel()
        await asyncio.wait([late])


async def test_large_bodies_take_no_room_of_small_ones() -> None:
    bodies = ArrivingBodies()
    assert bodies.of_size(1 << 10) is bodies.of_size(64 << 10)
    assert bodies.of_size(None) is bodies.of_size((64 << 10) + 1)
    assert len({id(bodies.of_size(1)), id(bodies.of_size(None)), id(bodies.grpc)}) == 3
