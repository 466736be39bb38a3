"""Room for bodies while they arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from baton.errors import Overloaded
from coordinator.frontend import arrival_pacer, body_budget
from coordinator.frontend.body_budget import BodyBudget, BodyBudgets, IncomingBody


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> BodyBudget:
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 60.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 60.0)
    return BodyBudget("bodies", 3, 100)


@pytest.mark.parametrize(("taken", "more"), [([1, 1, 1], 1), ([60, 40], 1), ([60], 41)])
async def test_room_is_bounded_in_number_and_bytes(
    stack: AsyncExitStack, room: BodyBudget, taken: list[int], more: int
) -> None:
    for size in taken:
        await stack.enter_async_context(room.reserve_body(size))
    with pytest.raises(Overloaded, match="at most 3 and 100 bytes at once") as caught:
        await stack.enter_async_context(room.reserve_body(more))
    assert caught.value.retry_after == 1.0
    assert (len(room), room.used_bytes) == (len(taken), sum(taken))
    await stack.aclose()
    assert (len(room), room.used_bytes) == (0, 0)


async def test_waiting_bodies_are_admitted_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 60.0)
    room, order = BodyBudget("bodies", 1, 100), list[int]()
    gone = asyncio.create_task(_reserve_and_record(room, 0, order))

    async with room.reserve_body(1):
        waiting = [
            asyncio.create_task(_reserve_and_record(room, number, order)) for number in range(1, 4)
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*waiting, gone, return_exceptions=True)
    assert order == [0, 1, 3]
    assert len(room) == 0


async def _reserve_and_record(room: BodyBudget, number: int, order: list[int]) -> None:
    async with room.reserve_body(1):
        order.append(number)


async def test_slow_body_is_displaced(
    stack: AsyncExitStack, room: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [asyncio.create_task(_stall_until_displaced(room)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(room) == 3
    with pytest.raises(Overloaded):
        await stack.enter_async_context(room.reserve_body(1))
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 0.0)
    await stack.enter_async_context(room.reserve_body(1))
    assert len(room) == 3
    oldest = await slow[0]
    assert oldest.is_displaced
    assert not any(task.done() for task in slow[1:])
    for task in slow[1:]:
        task.cancel()


async def _stall_until_displaced(room: BodyBudget, size: int = 1, owner: str = "") -> IncomingBody:
    """A body of which nothing more comes."""
    async with room.reserve_body(size, owner) as body:
        try:
            async with asyncio.timeout(60.0) as timer:
                body.start_reading(timer)
                await asyncio.Event().wait()
        except TimeoutError:
            return body
    raise AssertionError("it was not displaced")


async def test_complete_body_is_not_displaced(
    stack: AsyncExitStack, room: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 0.0)
    body = await stack.enter_async_context(room.reserve_body(100))
    async with asyncio.timeout(60.0) as timer:
        body.start_reading(timer)
        await asyncio.sleep(0)
        body.mark_complete()
    with pytest.raises(Overloaded):
        await stack.enter_async_context(room.reserve_body(1))


async def test_body_of_unknown_length_is_charged_as_it_grows(
    stack: AsyncExitStack, room: BodyBudget
) -> None:
    first, second = [await stack.enter_async_context(room.reserve_body(10)) for _ in range(2)]
    await first.grow_to(5)
    await first.grow_to(80)
    assert room.used_bytes == 90
    with pytest.raises(Overloaded):
        await second.grow_to(21)
    await second.grow_to(20)
    assert room.used_bytes == 100


async def test_growing_body_waits_and_goes_before_new_bodies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 60.0)
    room, order = BodyBudget("bodies", 9, 100), list[int]()

    async def grow(body: IncomingBody) -> None:
        await body.grow_to(80)
        order.append(0)

    async with room.reserve_body(20) as body:
        async with room.reserve_body(80):
            tasks = [
                asyncio.create_task(_reserve_and_record(room, 1, order)),
                asyncio.create_task(grow(body)),
            ]
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks)
    assert order == [0, 1]
    assert (len(room), room.used_bytes) == (0, 0)


async def test_stalled_body_is_displaced_by_growing_body(
    room: BodyBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = asyncio.create_task(_stall_until_displaced(room, 80))
    await asyncio.sleep(0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.0)
    async with room.reserve_body(20) as body:
        await body.grow_to(100)
        assert room.used_bytes == 100
    assert (await stalled).is_displaced


async def test_sweep_displaces_stalled_bodies_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody comes, ends or runs out of patience meanwhile."""
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 600.0)
    room, order = BodyBudget("bodies", 2, 100), list[int]()
    stalled = [asyncio.create_task(_stall_until_displaced(room)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(_reserve_and_record(room, number, order)) for number in range(2)]
    await asyncio.sleep(0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.0)
    await asyncio.gather(*waiting)
    assert order == [0, 1]
    assert (await stalled[0]).is_displaced
    for task in stalled:
        task.cancel()


async def test_waiters_of_a_full_client_do_not_block_other_clients(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "DISPLACE_SECONDS", 600.0)
    room = BodyBudget("bodies", 3, 100, max_bodies_per_client=2)
    greedy = [asyncio.create_task(_stall_until_displaced(room, 1, "greedy")) for _ in range(50)]
    await asyncio.sleep(0)
    assert len(room) == 2
    await stack.enter_async_context(room.reserve_body(1, "other"))
    later = [
        asyncio.create_task(stack.enter_async_context(room.reserve_body(1, owner)))
        for owner in ("greedy", "new")
    ]
    await asyncio.sleep(0)
    assert len(room) == 3
    greedy[0].cancel()
    await later[1]  # who has fewest comes first, though others have waited longer
    assert not later[0].done()
    for task in [*greedy, *later]:
        task.cancel()
    await asyncio.wait([*greedy, *later])


async def test_full_client_waits_for_its_own_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_WAIT_SECONDS", 600.0)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 600.0)
    room, order = BodyBudget("bodies", 9, 100, max_bodies_per_client=1), list[int]()
    stalled = asyncio.create_task(_stall_until_displaced(room))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(_reserve_and_record(room, 0, order))
    await asyncio.sleep(0)
    assert order == []
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.0)
    await waiting
    assert (await stalled).is_displaced


async def test_half_of_the_connections_may_send_bodies() -> None:
    bodies = BodyBudgets(8)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(bodies.get_budget(1).reserve_body(1))
        late = asyncio.create_task(stack.enter_async_context(bodies.get_budget(1).reserve_body(1)))
        await asyncio.sleep(0)
        assert len(bodies.get_budget(1)) == 4
        late.cancel()
        await asyncio.wait([late])


async def test_large_and_small_bodies_have_separate_budgets() -> None:
    bodies = BodyBudgets()
    assert bodies.get_budget(1 << 10) is bodies.get_budget(64 << 10)
    assert bodies.get_budget(None) is bodies.get_budget((64 << 10) + 1)
    assert len({id(bodies.get_budget(1)), id(bodies.get_budget(None)), id(bodies.grpc_budget)}) == 3


async def test_large_bodies_that_arrive_too_fast_are_read_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_SMALL_BODY_BYTES", 10)
    monkeypatch.setattr(body_budget, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(arrival_pacer, "ARRIVAL_RATE", 0.001)
    room = BodyBudget("bodies", 3, 100)
    async with room.reserve_body(1) as small, room.reserve_body(1) as large:
        large.start_reading(asyncio.timeout(60))
        await small.grow_to(10)
        paused = asyncio.create_task(large.grow_to(11))
        await asyncio.sleep(0)
        assert large.is_waiting
        assert not large.is_overdue(large.started_at + 1.0), "a paused body has not stalled"
        paused.cancel()
        await asyncio.gather(paused, return_exceptions=True)
        assert not large.is_waiting


async def test_single_bytes_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MIN_PROGRESS_BYTES", 10)
    room = BodyBudget("bodies", 1, 100)
    async with room.reserve_body(1) as body:
        body.start_reading(asyncio.timeout(60))
        body.progressed_at -= body_budget.STALL_SECONDS
        for size in range(2, 10):
            await body.grow_to(size)
            assert body.is_overdue(asyncio.get_running_loop().time())
        await body.grow_to(10)
        assert not body.is_overdue(body.progressed_at)


async def test_single_bytes_of_a_large_body_are_no_progress_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_budget, "MAX_SMALL_BODY_BYTES", 10)
    room = BodyBudget("bodies", 1, 1 << 20)
    async with room.reserve_body(1) as body:
        body.start_reading(asyncio.timeout(60))
        await body.grow_to(body_budget.MIN_PROGRESS_BYTES + 1)
        body.progressed_at -= body_budget.STALL_SECONDS
        for more in range(2, 6):
            await body.grow_to(body_budget.MIN_PROGRESS_BYTES + more)
            assert body.is_overdue(asyncio.get_running_loop().time())
