"""Who goes first among texts, and how many may wait."""

import asyncio
import threading
from functools import partial

import pytest

from baton.errors import InvalidRequest, Overloaded
from coordinator.text.text_workers import MAX_SHORT_BYTES, TextWorkers


async def test_smaller_work_goes_first_and_short_work_has_its_own_lane() -> None:
    workers, order, gate = TextWorkers(clock=lambda: 0.0), list[int](), threading.Event()
    busy = [asyncio.create_task(workers.run_work(gate.wait, MAX_SHORT_BYTES + 1)) for _ in range(2)]
    await asyncio.sleep(0)
    sizes = [MAX_SHORT_BYTES * 9, MAX_SHORT_BYTES * 2, MAX_SHORT_BYTES * 5]
    later = [
        asyncio.create_task(workers.run_work(partial(order.append, size), size)) for size in sizes
    ]
    await asyncio.sleep(0)
    assert await workers.run_work(lambda: "short", MAX_SHORT_BYTES) == "short"
    assert order == []
    gate.set()
    await asyncio.gather(*busy, *later)
    assert order[0] == min(sizes)  # there are two threads, so the other two may end in any order
    assert workers.pending_bytes == 0


async def test_large_work_does_not_starve() -> None:
    """One of the two threads stays busy, so that the other does one thing after another."""
    now = 0.0
    workers, order = TextWorkers(clock=lambda: now), list[int]()
    gates = [threading.Event(), threading.Event()]
    busy = [asyncio.create_task(workers.run_work(gate.wait, MAX_SHORT_BYTES + 1)) for gate in gates]
    await asyncio.sleep(0)
    large = asyncio.create_task(workers.run_work(lambda: order.append(0), 4 << 20))
    await asyncio.sleep(0)
    now = 60.0
    small = asyncio.create_task(workers.run_work(lambda: order.append(1), MAX_SHORT_BYTES + 1))
    await asyncio.sleep(0)
    gates[0].set()
    await asyncio.gather(large, small)
    assert order == [0, 1]
    gates[1].set()
    await asyncio.gather(*busy)


async def test_long_texts_do_not_use_the_short_budget() -> None:
    workers, gate = TextWorkers(), threading.Event()
    long = [asyncio.create_task(workers.run_work(gate.wait, 4 << 20)) for _ in range(12)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await workers.run_work(gate.wait, 4 << 20)
    assert await workers.run_work(lambda: "short", 3000) == "short"
    gate.set()
    await asyncio.gather(*long)


async def test_short_text_overtakes_a_full_queue_of_longer_ones() -> None:
    now = 0.0
    workers, order, gate = TextWorkers(clock=lambda: now), list[int](), threading.Event()
    busy = asyncio.create_task(workers.run_work(gate.wait, MAX_SHORT_BYTES))
    await asyncio.sleep(0)
    longer = [
        asyncio.create_task(workers.run_work(lambda: order.append(1), MAX_SHORT_BYTES))
        for _ in range(250)
    ]
    await asyncio.sleep(0)
    now = 10.0  # about what it takes to encode them
    short = asyncio.create_task(workers.run_work(lambda: order.append(0), 3000))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(busy, short, *longer)
    assert order[0] == 0


async def test_pending_text_is_bounded() -> None:
    workers, gate = TextWorkers(max_long_bytes=10 * MAX_SHORT_BYTES), threading.Event()
    tasks = [
        asyncio.create_task(workers.run_work(gate.wait, 3 * MAX_SHORT_BYTES)) for _ in range(3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(
        Overloaded,
        match=f"{9 * MAX_SHORT_BYTES} bytes of text wait .* the limit is {10 * MAX_SHORT_BYTES}",
    ):
        await workers.run_work(gate.wait, 2 * MAX_SHORT_BYTES)
    tasks[2].cancel()
    await asyncio.wait(tasks[2:])
    assert workers.pending_bytes == 6 * MAX_SHORT_BYTES  # it had not begun
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    assert workers.pending_bytes == 6 * MAX_SHORT_BYTES  # its thread goes on
    gate.set()
    await tasks[0]
    await workers.run_work(lambda: None, 10 * MAX_SHORT_BYTES - workers.pending_bytes)


async def test_errors_reach_the_caller() -> None:
    def refuse() -> None:
        raise InvalidRequest("no")

    workers = TextWorkers()
    for size in (1, MAX_SHORT_BYTES, MAX_SHORT_BYTES + 1):
        with pytest.raises(InvalidRequest, match="no"):
            await workers.run_work(refuse, size)
    assert workers.pending_bytes == 0
