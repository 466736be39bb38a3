"""A writer over shared memory is stopped in the middle of a write.

Its blocks stay quarantined until it is proven, by its end or by its own report, that it writes
no more. Later owners of the blocks are not affected by what it wrote."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.observed_cluster import ObservedCluster, PendingCall, make_call
from tests.history import ClientApi, Closed
from tests.paced_reference import paced_reference_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRITER = "prefill-0"
DECODE = "decode-0"
VICTIM_PROMPT_TOKENS = 480  # tokens: 30 blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "cuda_ipc"])
async def observed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ObservedCluster]:
    """One decode node, so that it is known where blocks are, and a second prefill node, so that
    requests are still served. Over cuda_ipc, device memory is the host's."""
    folder = tmp_path_factory.mktemp("frozen")
    async with ObservedCluster.build(
        folder, prefill=2, decode=1, transport=request.param, device="cpu", max_num_seqs=64
    ) as made:
        yield made
    made.cluster.assert_clean()


async def freeze_writer_in_a_write(observed: ObservedCluster, salt: int) -> list[PendingCall]:
    """WRITER has stopped itself while it holds the lock of some of DECODE's blocks, and its
    ticket has expired."""
    await observed.cluster.arm_failpoints(WRITER, "transfer.write.after=stop+2*1")
    asked: list[PendingCall] = []

    async def caught() -> bool:
        if all(one.task.done() for one in asked):  # by the other writer
            asked.append(
                observed.start_call(
                    make_call(ClientApi.SSE, VICTIM_PROMPT_TOKENS, 6, salt=salt + len(asked))
                )
            )
        return await count_quarantined(observed) > 0

    await observed.wait_until("a writer stopped in a write", caught)
    return asked


async def count_quarantined(observed: ObservedCluster) -> int:
    (ledger,) = [
        one for one in (await observed.cluster.get_ledgers()).ledgers if one.node == DECODE
    ]
    return int(ledger.quarantined)


async def fill_cache(observed: ObservedCluster, salt: int) -> None:
    """Send new prompts that need every block of DECODE; all must be answered correctly."""
    calls = [make_call(ClientApi.GRPC_ONCE, 950, 3, salt=salt + number) for number in range(10)]
    operations = [await asked.wait_end() for asked in [observed.start_call(one) for one in calls]]
    for operation in operations:
        assert operation.end == Closed(is_orderly=True), operation.events[-1]
        assert list(operation.tokens) == paced_reference_tokens(operation.call.prompt, 3)


async def test_blocks_stay_quarantined_until_the_writer_is_dead(observed: ObservedCluster) -> None:
    asked = await freeze_writer_in_a_write(observed, salt=100)
    held = await count_quarantined(observed)
    assert held == VICTIM_PROMPT_TOKENS // 16
    await fill_cache(observed, salt=200)  # everything but these blocks is used meanwhile
    assert await count_quarantined(observed) == held
    observed.cluster.kill(WRITER)
    await observed.wait_until("the blocks back", lambda: _has_no_quarantine(observed))
    observed.cluster.start_missing()
    for one in asked:  # placed again with the other writer, long ago
        assert (await one.wait_end()).end == Closed(is_orderly=True)
    await fill_cache(observed, salt=300)
    await observed.recover_and_check()


@pytest.mark.thorough
async def test_resumed_writer_writes_only_into_quarantined_blocks(
    observed: ObservedCluster,
) -> None:
    asked = await freeze_writer_in_a_write(observed, salt=400)
    for one in asked:
        assert (await one.wait_end()).end == Closed(is_orderly=True)
    await fill_cache(observed, salt=500)
    assert await count_quarantined(observed) == VICTIM_PROMPT_TOKENS // 16
    observed.cluster.resume(WRITER)
    await observed.wait_until("the blocks back", lambda: _has_no_quarantine(observed))
    await fill_cache(observed, salt=600)
    await observed.recover_and_check()


@pytest.mark.thorough
async def test_rejoins_do_not_release_quarantined_blocks(observed: ObservedCluster) -> None:
    """The decode node rejoins and the coordinator is restarted; the writer still lives and holds
    its lock."""
    asked = await freeze_writer_in_a_write(observed, salt=700)
    for one in asked:
        await one.wait_end()
    observed.cluster.proxies[f"{DECODE} -> coordinator"].reset_connections()
    await asyncio.sleep(0)
    await fill_cache(observed, salt=800)
    assert await count_quarantined(observed) == VICTIM_PROMPT_TOKENS // 16
    observed.cluster.kill("coordinator")
    observed.was_coordinator_killed = True
    observed.cluster.start("coordinator")
    await observed.wait_until("decode is back", lambda: _joined(observed))
    assert await count_quarantined(observed) == VICTIM_PROMPT_TOKENS // 16
    observed.cluster.kill(WRITER)
    await observed.wait_until("the blocks back", lambda: _has_no_quarantine(observed))
    await observed.recover_and_check()


async def _has_no_quarantine(observed: ObservedCluster) -> bool:
    return await count_quarantined(observed) == 0


async def _joined(observed: ObservedCluster) -> bool:
    return DECODE in await observed.get_joined_nodes()
