"""Prompts of the parity tests with a pool, and how much of each the pool has."""

import asyncio

from tests.cluster import Cluster
from tests.pool.pooled_cluster import (
    BLOCK_TOKENS,
    read_metric,
)

LENGTHS = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 600)  # the last in several chunks
OUTPUT_TOKENS = 24
FILLER_PROMPTS = [[number] * 1900 for number in range(1, 6)]  # together more than memory holds


def hit_lengths(length: int) -> list[int]:
    """How many tokens of the prompt have been asked for before: none, a block, half, all but one,
    all."""
    return sorted(
        {known for known in (0, BLOCK_TOKENS, length // 2, length - 1, length) if known <= length}
    )


async def wait_publications_done(cluster: Cluster) -> None:
    """Until nothing is computed or published any more."""
    counts = [-1.0, await read_metric(cluster, r"baton_pool_published_blocks_total\S*")]
    while counts[-1] != counts[-2]:
        await cluster.wait_idle()
        await asyncio.sleep(0.25)  # two heartbeats
        counts.append(await read_metric(cluster, r"baton_pool_published_blocks_total\S*"))
