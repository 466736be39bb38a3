"""More than the caches hold: waves of clients that all go away, requests that collide, requests that can never fit."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.scene import Scene, call
from tests.history import Closed, Door, Failed

IN_MODULE = pytest.mark.asyncio(loop_scope="module")

CACHE = 8192  # tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """One node of each kind, whose cache holds one long prompt and little more."""
    settings = {
        "prefill": 1,
        "decode": 1,
        "max_model_len": 2 * CACHE,
        "max_batched_tokens": 1024,
        "max_num_seqs": 64,
        "paced_prefill_us_per_token": 20.0,
        "request_timeout": 60.0,
    }
    async with Scene.build(tmp_path_factory.mktemp("full"), **settings) as made:
        yield made
    made.cluster.assert_clean()


@IN_MODULE
async def test_waves_of_cancelled_requests_leave_nothing(scene: Scene) -> None:
    for wave in range(3):
        crowd = [
            scene.ask(call(list(Door)[number % 4], 300, 200, salt=1000 * wave + number, timeout=60.0))
            for number in range(100)
        ]
        await scene.until_blocks("in_use")
        await asyncio.sleep(0.1 * wave)  # at other moments of a wave's life
        await asyncio.gather(*(asked.leave() for asked in crowd))
    await scene.answer(call(Door.SSE, 100, 3))
    await scene.settle()


@IN_MODULE
async def test_requests_that_collide_are_all_answered(scene: Scene) -> None:
    """Any two fit at first, and no two fit with their outputs: somebody is preempted, and goes on later."""
    length, output = CACHE // 2 - 100, 200
    replaced = await scene.counter("baton_replaced_total")

    async def two_are_in() -> bool:
        ledgers = (await scene.cluster.ledgers()).ledgers
        return any(ledger.node.startswith("decode") and ledger.in_use >= 2 * (length // 16) for ledger in ledgers)

    await scene.cluster.arm("decode", "decode.step.before=delay(0.2)")  # the first is not done when the second comes
    crowd = [scene.ask(call(Door.SSE, length, output, salt=number, timeout=60.0)) for number in range(3)]
    await scene.until("two in the cache", two_are_in)
    await scene.cluster.arm("decode", "")
    ends = [(await asked.over()).end for asked in crowd]
    assert ends == [Closed(in_order=True)] * len(crowd)
    assert await scene.counter("baton_replaced_total") > replaced
    await scene.settle()


@IN_MODULE
async def test_small_requests_pass_one_that_waits_for_room_and_do_not_starve_it(scene: Scene) -> None:
    big = [scene.ask(call(Door.GRPC_ONCE, 5000, 8, salt=number, timeout=60.0)) for number in range(3)]
    small = [scene.ask(call(Door.GRPC_ONCE, 64, 8, salt=number, timeout=60.0)) for number in range(40)]
    for asked in [*small, *big]:
        assert (await asked.over()).end == Closed(in_order=True)
    await scene.settle()


@IN_MODULE
@pytest.mark.parametrize("door", list(Door), ids=lambda door: door.value)
async def test_what_can_never_fit_is_refused_and_holds_nothing(scene: Scene, door: Door) -> None:
    refused = [
        await scene.ask(call(door, CACHE + 1, 1)).over(),
        await scene.ask(call(door, CACHE - 10, 11)).over(),
    ]
    for operation in refused:
        assert isinstance(operation.end, Failed)
        assert operation.end.code == "INVALID_ARGUMENT"
        assert str(CACHE) in operation.end.message
    scene.forget(refused)
    await scene.answer(call(door, CACHE - 10, 10))
    await scene.settle()
