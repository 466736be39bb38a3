"""A writer over shared memory that is stopped in the middle of a write: its blocks are nobody's until it is proven that
it writes no more, by its end or by its own hand. Whoever gets them then is not hurt by what it wrote."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from node_engine.paced import paced_reference
from tests.faults.scene import Asked, Scene, call
from tests.history import Closed, Door

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRITER = "prefill-0"
DECODE = "decode-0"
VICTIM = 480  # tokens: 30 blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """One decode node, so that it is known where blocks are; a second prefill node, so that work goes on."""
    folder = tmp_path_factory.mktemp("frozen")
    async with Scene.build(folder, prefill=2, decode=1, transport="shm", max_num_seqs=64) as made:
        yield made
    made.cluster.assert_clean()


async def frozen_in_a_write(scene: Scene, salt: int) -> list[Asked]:
    """WRITER has stopped itself with a lock on some of DECODE's blocks, and its ticket has run out."""
    await scene.cluster.arm(WRITER, "transfer.write.after=stop+2*1")
    asked: list[Asked] = []

    async def caught() -> bool:
        if all(one.task.done() for one in asked):  # by the other writer
            asked.append(scene.ask(call(Door.SSE, VICTIM, 6, salt=salt + len(asked))))
        return await quarantined(scene) > 0

    await scene.until("a writer stopped in a write", caught)
    return asked


async def quarantined(scene: Scene) -> int:
    (ledger,) = [one for one in (await scene.cluster.ledgers()).ledgers if one.node == DECODE]
    return int(ledger.quarantined)


async def crowd(scene: Scene, salt: int) -> None:
    """Other prompts than ever before, enough to want every block of DECODE; all are answered rightly."""
    calls = [call(Door.GRPC_ONCE, 950, 3, salt=salt + number) for number in range(10)]
    operations = [await asked.over() for asked in [scene.ask(one) for one in calls]]
    for operation in operations:
        assert operation.end == Closed(in_order=True), operation.events[-1]
        assert list(operation.tokens) == paced_reference(operation.call.prompt, 3)


async def test_blocks_stay_quarantined_until_the_writer_is_dead(scene: Scene) -> None:
    asked = await frozen_in_a_write(scene, salt=100)
    held = await quarantined(scene)
    assert held == VICTIM // 16
    await crowd(scene, salt=200)  # everything but these blocks is used meanwhile
    assert await quarantined(scene) == held
    scene.cluster.kill(WRITER)
    await scene.until("the blocks back", lambda: _none(scene))
    scene.cluster.revive()
    for one in asked:  # placed again with the other writer, long ago
        assert (await one.over()).end == Closed(in_order=True)
    await crowd(scene, salt=300)
    await scene.settle()


@pytest.mark.thorough
async def test_a_writer_that_wakes_up_writes_into_nobodys_blocks(scene: Scene) -> None:
    asked = await frozen_in_a_write(scene, salt=400)
    for one in asked:
        assert (await one.over()).end == Closed(in_order=True)
    await crowd(scene, salt=500)
    assert await quarantined(scene) == VICTIM // 16
    scene.cluster.cont(WRITER)
    await scene.until("the blocks back", lambda: _none(scene))
    await crowd(scene, salt=600)
    await scene.settle()


@pytest.mark.thorough
async def test_no_message_releases_them(scene: Scene) -> None:
    """Decode joins anew, the coordinator is another one: the writer is as alive as before, and so is its lock."""
    asked = await frozen_in_a_write(scene, salt=700)
    for one in asked:
        await one.over()
    scene.cluster.links[f"{DECODE} -> coordinator"].reset()
    await asyncio.sleep(0)
    await crowd(scene, salt=800)
    assert await quarantined(scene) == VICTIM // 16
    scene.cluster.kill("coordinator")
    scene.coordinator_died = True
    scene.cluster.start("coordinator")
    await scene.until("decode is back", lambda: _joined(scene))
    assert await quarantined(scene) == VICTIM // 16
    scene.cluster.kill(WRITER)
    await scene.until("the blocks back", lambda: _none(scene))
    await scene.settle()


async def _none(scene: Scene) -> bool:
    return await quarantined(scene) == 0


async def _joined(scene: Scene) -> bool:
    return DECODE in await scene.joined()
