"""A writer over shared memory that is stopped in the middle of a write: its blocks are nobody's
until it is proven that it writes no more, by its end or by its own hand. Whoever gets them then is
not hurt by what it wrote."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from node_engine.paced.paced_engine import paced_reference_tokens
from tests.faults.observed_cluster import ObservedCluster, PendingCall, make_call
from tests.history import ClientApi, Closed

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRITER = "prefill-0"
DECODE = "decode-0"
VICTIM_PROMPT_TOKENS = 480  # tokens: 30 blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ObservedCluster]:
    """One decode node, so that it is known where blocks are; a second prefill node, so that work
    goes on."""
    folder = tmp_path_factory.mktemp("frozen")
    async with ObservedCluster.build(
        folder, prefill=2, decode=1, transport="shm", max_num_seqs=64
    ) as made:
        yield made
    made.cluster.assert_clean()


async def freeze_writer_in_a_write(scene: ObservedCluster, salt: int) -> list[PendingCall]:
    """WRITER has stopped itself with a lock on some of DECODE's blocks, and its ticket has run
    out."""
    await scene.cluster.arm_failpoints(WRITER, "transfer.write.after=stop+2*1")
    asked: list[PendingCall] = []

    async def caught() -> bool:
        if all(one.task.done() for one in asked):  # by the other writer
            asked.append(
                scene.start_call(
                    make_call(ClientApi.SSE, VICTIM_PROMPT_TOKENS, 6, salt=salt + len(asked))
                )
            )
        return await count_quarantined(scene) > 0

    await scene.wait_until("a writer stopped in a write", caught)
    return asked


async def count_quarantined(scene: ObservedCluster) -> int:
    (ledger,) = [one for one in (await scene.cluster.get_ledgers()).ledgers if one.node == DECODE]
    return int(ledger.quarantined)


async def fill_cache(scene: ObservedCluster, salt: int) -> None:
    """Other prompts than ever before, enough to want every block of DECODE; all are answered
    rightly."""
    calls = [make_call(ClientApi.GRPC_ONCE, 950, 3, salt=salt + number) for number in range(10)]
    operations = [await asked.wait_end() for asked in [scene.start_call(one) for one in calls]]
    for operation in operations:
        assert operation.end == Closed(is_orderly=True), operation.events[-1]
        assert list(operation.tokens) == paced_reference_tokens(operation.call.prompt, 3)


async def test_blocks_stay_quarantined_until_the_writer_is_dead(scene: ObservedCluster) -> None:
    asked = await freeze_writer_in_a_write(scene, salt=100)
    held = await count_quarantined(scene)
    assert held == VICTIM_PROMPT_TOKENS // 16
    await fill_cache(scene, salt=200)  # everything but these blocks is used meanwhile
    assert await count_quarantined(scene) == held
    scene.cluster.kill(WRITER)
    await scene.wait_until("the blocks back", lambda: _has_no_quarantine(scene))
    scene.cluster.start_missing()
    for one in asked:  # placed again with the other writer, long ago
        assert (await one.wait_end()).end == Closed(is_orderly=True)
    await fill_cache(scene, salt=300)
    await scene.recover_and_check()


@pytest.mark.thorough
async def test_resumed_writer_writes_only_into_quarantined_blocks(scene: ObservedCluster) -> None:
    asked = await freeze_writer_in_a_write(scene, salt=400)
    for one in asked:
        assert (await one.wait_end()).end == Closed(is_orderly=True)
    await fill_cache(scene, salt=500)
    assert await count_quarantined(scene) == VICTIM_PROMPT_TOKENS // 16
    scene.cluster.resume(WRITER)
    await scene.wait_until("the blocks back", lambda: _has_no_quarantine(scene))
    await fill_cache(scene, salt=600)
    await scene.recover_and_check()


@pytest.mark.thorough
async def test_rejoins_do_not_release_quarantined_blocks(scene: ObservedCluster) -> None:
    """Decode joins anew, the coordinator is another one: the writer is as alive as before, and so
    is its lock."""
    asked = await freeze_writer_in_a_write(scene, salt=700)
    for one in asked:
        await one.wait_end()
    scene.cluster.proxies[f"{DECODE} -> coordinator"].reset_connections()
    await asyncio.sleep(0)
    await fill_cache(scene, salt=800)
    assert await count_quarantined(scene) == VICTIM_PROMPT_TOKENS // 16
    scene.cluster.kill("coordinator")
    scene.was_coordinator_killed = True
    scene.cluster.start("coordinator")
    await scene.wait_until("decode is back", lambda: _joined(scene))
    assert await count_quarantined(scene) == VICTIM_PROMPT_TOKENS // 16
    scene.cluster.kill(WRITER)
    await scene.wait_until("the blocks back", lambda: _has_no_quarantine(scene))
    await scene.recover_and_check()


async def _has_no_quarantine(scene: ObservedCluster) -> bool:
    return await count_quarantined(scene) == 0


async def _joined(scene: ObservedCluster) -> bool:
    return DECODE in await scene.get_joined_nodes()
