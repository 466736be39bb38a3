"""A prompt that another node is publishing is waited for, and not computed twice."""

import asyncio
import math
from pathlib import Path

import pytest

from baton.process.clock import FakeClock
from kv_pool.core.blocks.attachments import PoolClientId, PublicationGrant, PublicationId
from kv_pool.memory.pending_blocks import MAX_WAIT_SECONDS, PendingPublications
from tests.cluster import Cluster
from tests.paced_reference import paced_reference_tokens
from tests.pool.harness import TIMEOUT_SECONDS
from tests.pool.pooled_cluster import (
    BLOCK_TOKENS,
    get_token_sources,
    inserted_blocks_metric,
    pooled_cluster,
    read_metric,
    wait_for_metric,
)
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, make_block_chain

PREFIX = tuple(range(1000, 1160))  # 160 tokens, ten blocks
PUBLISHER, READER = PoolClientId("node"), PoolClientId("other")
PROMPT = make_block_chain(1, 2, 3, 4)


@pytest.mark.asyncio
async def test_request_within_the_publish_lag_waits_for_the_publication(tmp_path: Path) -> None:
    """The request is on the other two nodes. Computing the prefix takes 3 s. The publication is
    held for a tenth of a second, and look-ups do not wait for one that is late."""
    settings = {
        "engine": "paced",
        "placement": "round_robin",
        "paced_prefill_us_per_token": 20000.0,
    }
    async with pooled_cluster(tmp_path, prefill=2, decode=2, **settings) as cluster:
        await cluster.arm_failpoints("prefill", "pool.copy.before=delay(0.1)*1")
        prompts = [[*PREFIX, 1], [*PREFIX, 2]]
        async with cluster.stream_generate(prompts[0], max_tokens=20, ignore_eos=True) as call:
            parts = [await anext(aiter(call))]  # its prompt is computed
            await wait_until_publishing(cluster)
            second = await cluster.generate(prompts[1], max_tokens=4, ignore_eos=True)
            parts += [part async for part in call]
        await cluster.arm_failpoints("prefill", "")
        assert [token for part in parts for token in part.token_ids] == paced_reference_tokens(
            prompts[0], 20
        )
        assert list(second.tokens) == paced_reference_tokens(prompts[1], 4)
        sources = await get_token_sources(cluster, second)
        await wait_for_metric(cluster, inserted_blocks_metric("pool-0"), 10)
        await wait_for_metric(cluster, r"baton_pool_publications_total\S*", 1)
        is_late = await read_metric(cluster, r"baton_pool_publications_late_total\S*") > 0
        assert sources["computed_prefill"] + sources["computed_decode"] == 1 or is_late, sources


async def wait_until_publishing(cluster: Cluster) -> None:
    """Wait until blocks have been reserved for the publication, or it is over."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            (pool,) = [
                ledger
                for ledger in (await cluster.get_ledgers()).ledgers
                if ledger.node == "pool-0"
            ]
            if pool.writing or pool.cached + pool.in_use >= len(PREFIX) // BLOCK_TOKENS:
                return


def make_pending_publications(clock: FakeClock) -> PendingPublications:
    publications = PendingPublications(clock)
    publications.add_publication(
        PUBLISHER, PROMPT, PublicationGrant(PublicationId(7), 1, (10, 11, 12))
    )
    return publications


@pytest.mark.asyncio
async def test_wait_for_a_publication_is_bounded_by_compute_time() -> None:
    clock = FakeClock()
    found = make_pending_publications(clock)
    assert found.find_pending(READER, PROMPT, 0, 4, None) is None, (
        "the block before is not on its way"
    )
    assert found.find_pending(READER, make_block_chain(1, 9), 1, 2, None) is None, "another prompt"
    assert found.find_pending(READER, PROMPT, 1, 1, None) is None, "no more is wanted"
    assert found.find_pending(PUBLISHER, PROMPT, 1, 4, None) is None, "it has them"
    pending = found.find_pending(READER, PROMPT, 1, 3, None)
    assert pending is not None
    assert (pending.num_blocks, pending.max_wait_seconds) == (2, MAX_WAIT_SECONDS)
    brief = found.find_pending(READER, PROMPT, 1, 4, 0.001)
    assert brief is not None
    assert math.isclose(brief.max_wait_seconds, 3 * PROMPT_BLOCK_TOKENS * 0.001)
    clock.advance(3 * PROMPT_BLOCK_TOKENS * 0.001)
    assert found.find_pending(READER, PROMPT, 1, 4, 0.001) is None, (
        "computing would have been as quick"
    )
    assert not pending.done_event.is_set()
    found.remove_publication(PUBLISHER, PublicationId(7))
    assert pending.done_event.is_set()
    assert brief.done_event.is_set()
    assert found.find_pending(READER, PROMPT, 1, 4, None) is None
    assert len(found) == 0


@pytest.mark.asyncio
async def test_detached_publisher_ends_every_wait() -> None:
    found = make_pending_publications(FakeClock())
    pending = found.find_pending(READER, PROMPT, 1, 4, None)
    assert pending is not None
    found.remove_publisher(PUBLISHER)
    await asyncio.wait_for(pending.done_event.wait(), TIMEOUT_SECONDS)
    assert len(found) == 0
