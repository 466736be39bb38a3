"""Large bodies are decoded at a bounded rate, and moderate ones do not queue behind them."""

import asyncio

import pytest

from baton.errors import Overloaded
from baton.limits import MAX_SMALL_BODY_BYTES
from baton.process.clock import FakeClock
from coordinator.frontend import decoding_pacer
from coordinator.frontend.body_budget import BodyBudget
from coordinator.frontend.decoding_pacer import LARGE_RATE, MAX_WAIT, MODERATE_BODY, DecodingPacer

LARGE = 4 << 20


async def test_small_and_moderate_bodies_do_not_wait_for_large_ones() -> None:
    pacer = DecodingPacer(FakeClock())
    await pacer.wait_turn(LARGE, "client")
    waiting = asyncio.create_task(pacer.wait_turn(LARGE, "client"))
    await asyncio.sleep(0)
    async with BodyBudget("bodies", 1, LARGE, pacer=pacer).reserve_body(1, "client") as small:
        await small.wait_to_decode(MAX_SMALL_BODY_BYTES)
    await pacer.wait_turn(MODERATE_BODY, "client")
    assert not waiting.done()
    waiting.cancel()


async def test_large_bodies_get_their_turns_in_order_and_at_the_rate() -> None:
    clock = FakeClock()
    pacer, order = DecodingPacer(clock), list[int]()

    async def decode(number: int) -> None:
        await pacer.wait_turn(LARGE, "client")
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
    assert not pacer._large._waiting_bytes


async def test_many_bodies_of_one_client_delay_another_client_by_one_turn() -> None:
    clock = FakeClock()
    pacer, order = DecodingPacer(clock), list[str]()

    async def decode(client: str) -> None:
        await pacer.wait_turn(LARGE, client)
        order.append(client)

    await decode("greedy")
    clients = ["greedy"] * 5 + ["modest", "other"]
    tasks = [asyncio.create_task(decode(client)) for client in clients]
    await asyncio.sleep(0)
    for _ in clients:
        clock.advance(LARGE / LARGE_RATE)
        pacer._large._give_turns()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["greedy", "greedy", "modest", "other", *["greedy"] * 4]


async def test_a_full_queue_refuses_bodies_of_the_client_with_the_most_waiting() -> None:
    pacer = DecodingPacer(FakeClock())
    await pacer.wait_turn(LARGE, "greedy")
    greedy = [asyncio.create_task(pacer.wait_turn(LARGE, "greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    refused = sum(task.done() for task in greedy)
    modest = asyncio.create_task(pacer.wait_turn(LARGE, "modest"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not modest.done()
    assert sum(task.done() for task in greedy) == refused + 1
    assert pacer._large._waiting_bytes.total() <= MAX_WAIT * LARGE_RATE + LARGE
    for task in (modest, *greedy):
        task.cancel()
    await asyncio.gather(modest, *greedy, return_exceptions=True)
    assert not pacer._large._waiters


async def test_a_body_that_has_waited_for_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that come later may have their turns before it."""
    monkeypatch.setattr(decoding_pacer, "MAX_WAIT", 0.0)
    queue = DecodingPacer(FakeClock())._large
    monkeypatch.setattr(queue, "_make_room", lambda *_: None)
    await queue.wait_turn(LARGE, "client")
    with pytest.raises(Overloaded):
        await queue.wait_turn(LARGE, "client")
    assert not queue._waiters


async def test_a_body_whose_client_is_gone_costs_no_turn() -> None:
    clock = FakeClock()
    pacer = DecodingPacer(clock)
    await pacer.wait_turn(LARGE, "client")
    gone, other = (asyncio.create_task(pacer.wait_turn(LARGE, "client")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    clock.advance(LARGE / LARGE_RATE)
    pacer._large._give_turns()
    await other


async def test_a_body_that_would_wait_for_too_long_is_refused() -> None:
    pacer = DecodingPacer(FakeClock())
    await pacer.wait_turn(LARGE, "client")
    tasks = [asyncio.create_task(pacer.wait_turn(LARGE, "client")) for _ in range(100)]
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
            await pacer.wait_turn(LARGE, "client")
