"""The arrival pacer: large bodies are read one after another, short ones first."""

import asyncio

import pytest

from coordinator.frontend import arrival_pacer
from coordinator.frontend.arrival_pacer import ArrivalPacer

pytestmark = pytest.mark.asyncio


async def _start_waiting(
    pacer: ArrivalPacer, order: list[int], *sizes: int
) -> list[asyncio.Task[None]]:
    async def wait(size: int) -> None:
        await pacer.wait_turn(size, size)
        order.append(size)

    tasks = [asyncio.create_task(wait(size)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


async def test_the_body_with_the_fewest_bytes_is_read_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrival_pacer, "ARRIVAL_RATE", 100_000)
    order: list[int] = []
    tasks = await _start_waiting(ArrivalPacer(), order, 900, 500, 100, 700)
    await asyncio.gather(*tasks)
    assert order == [100, 500, 700, 900]


async def test_equal_bodies_are_read_in_the_order_of_their_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrival_pacer, "ARRIVAL_RATE", 100_000)
    order: list[int] = []
    pacer = ArrivalPacer()

    async def wait(number: int) -> None:
        await pacer.wait_turn(100, 100)
        order.append(number)

    await asyncio.gather(*(wait(number) for number in range(5)))
    assert order == list(range(5))


async def test_all_bytes_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte takes a day: whoever waits for the charge of one byte waits."""
    monkeypatch.setattr(arrival_pacer, "ARRIVAL_RATE", 1 / 86_400)
    order: list[int] = []
    tasks = await _start_waiting(ArrivalPacer(), order, 1)
    done, waiting = await asyncio.wait(tasks, timeout=0.05)
    assert not done
    assert len(waiting) == 1
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_body_that_was_given_up_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_pacer, "ARRIVAL_RATE", 100_000)
    order: list[int] = []
    tasks = await _start_waiting(ArrivalPacer(), order, 100, 200)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [200]
