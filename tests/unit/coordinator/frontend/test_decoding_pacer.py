"""Large bodies are decoded at a bounded rate, and moderate ones do not queue behind them."""

import asyncio

import pytest

from baton.errors import Overloaded
from baton.limits import MAX_SMALL_BODY_BYTES
from baton.process.clock import FakeClock
from coordinator.frontend import decoding_pacer
from coordinator.frontend.decoding_pacer import LARGE_RATE, MAX_WAIT, MODERATE_BODY, DecodingPacer

LARGE = 4 << 20


async def test_small_and_moderate_bodies_do_not_wait_for_large_ones() -> None:
    pacer = DecodingPacer(FakeClock())
    await pacer.wait_turn(LARGE)
    waiting = asyncio.create_task(pacer.wait_turn(LARGE))
    await asyncio.sleep(0)
    await pacer.wait_turn(MAX_SMALL_BODY_BYTES)
    await pacer.wait_turn(MODERATE_BODY)
    assert not waiting.done()
    waiting.cancel()


async def test_large_bodies_get_their_turns_in_order_and_at_the_rate() -> None:
    clock = FakeClock()
    pacer, order = DecodingPacer(clock), list[int]()

    async def decode(number: int) -> None:
        await pacer.wait_turn(LARGE)
        order.append(number)

    await decode(0)
    tasks = [asyncio.create_task(decode(number)) for number in (1, 2, 3)]
    await asyncio.sleep(0)
    assert order == [0]
    for expected in (1, 2, 3):
        clock.advance(LARGE / LARGE_RATE)
        pacer._large._give_turns()
        await asyncio.sleep(0)
        assert order == list(range(expected + 1))
    await asyncio.gather(*tasks)
    assert pacer._large._waiting_bytes == 0


async def test_a_body_whose_client_is_gone_costs_no_turn() -> None:
    clock = FakeClock()
    pacer = DecodingPacer(clock)
    await pacer.wait_turn(LARGE)
    gone, other = (asyncio.create_task(pacer.wait_turn(LARGE)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    clock.advance(LARGE / LARGE_RATE)
    pacer._large._give_turns()
    await other


async def test_a_body_that_would_wait_for_too_long_is_refused() -> None:
    pacer = DecodingPacer(FakeClock())
    await pacer.wait_turn(LARGE)
    tasks = [asyncio.create_task(pacer.wait_turn(LARGE)) for _ in range(100)]
    await asyncio.sleep(0)
    refused = [task for task in tasks if task.done()]
    for task in refused:
        with pytest.raises(Overloaded, match=f"at most {MAX_WAIT:g} s"):
            await task
    assert len(tasks) - len(refused) <= MAX_WAIT * LARGE_RATE / LARGE + 1
    for task in tasks:
        task.cancel()


async def test_a_turn_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_pacer, "LARGE_RATE", 1 << 30)
    pacer = DecodingPacer()
    for _ in range(3):
        async with asyncio.timeout(60):
            await pacer.wait_turn(LARGE)
