"""A prompt that another node is publishing is waited for, and not computed a second time."""

import asyncio
import math
from pathlib import Path

import pytest

from baton.clock import FakeClock
from kv_pool.core.holders import Granted, Holder, PublicationId
from kv_pool.publications import PATIENCE as MOST_WAITED
from kv_pool.publications import Publications
from node_engine.paced import paced_reference
from tests.cluster import Cluster
from tests.pool.cluster import BLOCK, inserted, pooled_cluster, reaches, sources
from tests.pool.rig import PATIENCE
from tests.unit.pool_core.prompts import SIZE, of_blocks

PREFIX = tuple(range(1000, 1160))  # 160 tokens, ten blocks
NODE, OTHER = Holder("node"), Holder("other")
PROMPT = of_blocks(1, 2, 3, 4)


@pytest.mark.asyncio
async def test_a_follower_within_the_publish_lag_takes_what_is_published(tmp_path: Path) -> None:
    """It is on the other two nodes. Ten copies of 30 ms are the lag; computing the prefix takes 3 s."""
    settings = {"engine": "paced", "placement": "round_robin", "paced_prefill_us_per_token": 20000.0}
    async with pooled_cluster(tmp_path, prefill=2, decode=2, **settings) as cluster:
        await cluster.arm("prefill", "pool.copy.before=delay(0.03)")
        prompts = [[*PREFIX, 1], [*PREFIX, 2]]
        async with cluster.streaming(prompts[0], max_tokens=20, ignore_eos=True) as call:
            parts = [await anext(aiter(call))]  # its prompt is computed
            await being_published(cluster)
            second = await cluster.generate(prompts[1], max_tokens=4, ignore_eos=True)
            parts += [part async for part in call]
        await cluster.arm("prefill", "")
        assert [token for part in parts for token in part.token_ids] == paced_reference(prompts[0], 20)
        assert list(second.tokens) == paced_reference(prompts[1], 4)
        came = await sources(cluster, second)
        assert came["computed_prefill"] + came["computed_decode"] == 1, came
        await reaches(cluster, inserted("pool-0"), 10)


async def being_published(cluster: Cluster) -> None:
    """Until places have been reserved for it, or it is over."""
    async with asyncio.timeout(PATIENCE):
        while True:
            (pool,) = [one for one in (await cluster.ledgers()).ledgers if one.node == "pool-0"]
            if pool.writing or pool.cached + pool.in_use >= len(PREFIX) // BLOCK:
                return


def begun(clock: FakeClock) -> Publications:
    made = Publications(clock)
    made.begin(NODE, PROMPT, Granted(PublicationId(7), 1, (10, 11, 12)))
    return made


@pytest.mark.asyncio
async def test_who_waits_for_a_publication_and_for_how_long() -> None:
    clock = FakeClock()
    found = begun(clock)
    assert found.expected(OTHER, PROMPT, 0, 4, None) is None, "the block before is not on its way"
    assert found.expected(OTHER, of_blocks(1, 9), 1, 2, None) is None, "another prompt"
    assert found.expected(OTHER, PROMPT, 1, 1, None) is None, "no more is wanted"
    assert found.expected(NODE, PROMPT, 1, 4, None) is None, "it has them"
    arrival = found.expected(OTHER, PROMPT, 1, 3, None)
    assert arrival is not None
    assert (arrival.blocks, arrival.patience) == (2, MOST_WAITED)
    brief = found.expected(OTHER, PROMPT, 1, 4, 0.001)
    assert brief is not None
    assert math.isclose(brief.patience, 3 * SIZE * 0.001)
    clock.advance(3 * SIZE * 0.001)
    assert found.expected(OTHER, PROMPT, 1, 4, 0.001) is None, "computing would have been as quick"
    assert not arrival.over.is_set()
    found.ended(NODE, PublicationId(7))
    assert arrival.over.is_set()
    assert brief.over.is_set()
    assert found.expected(OTHER, PROMPT, 1, 4, None) is None
    assert len(found) == 0


@pytest.mark.asyncio
async def test_a_publisher_that_goes_ends_every_wait() -> None:
    found = begun(FakeClock())
    arrival = found.expected(OTHER, PROMPT, 1, 4, None)
    assert arrival is not None
    found.all_ended(NODE)
    await asyncio.wait_for(arrival.over.wait(), PATIENCE)
    assert len(found) == 0
