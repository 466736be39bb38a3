"""A pool whose memory is full."""

from itertools import count

import pytest

from baton.kv.blocks import iter_block_hashes, short_hash
from tests.pool.conftest import PoolTestHost
from tests.pool.harness import (
    LAYOUT,
    OWN_BLOCKS,
    UNSALTED_ROOT,
    expected_blocks,
    make_tokens,
    wait_until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"pool_eviction": "lru"}
_SEEDS = count(1)


async def test_full_memory_evicts_unpinned_blocks_only(host: PoolTestHost) -> None:
    node = await host.start_node()
    total = (await host.registrar.query_ledger()).total
    kept_tokens = make_tokens(next(_SEEDS), total // 4)
    kept = await node.publish_tokens(kept_tokens)
    assert kept is not None
    for _ in range(8):
        hit = await node.publish_tokens(make_tokens(next(_SEEDS), total // 4))
        assert hit is not None
        assert len(hit.blocks) == total // 4
        node.release_hit(hit)
    assert node.read_blocks(kept) == expected_blocks(kept_tokens)
    await wait_until(
        "evictions told",
        lambda: host.registrar.stats.counters['baton_pool_evictions_total{tier="memory"}'],
    )
    node.release_hit(kept)


async def test_publication_fails_without_error_when_everything_is_pinned(
    host: PoolTestHost,
) -> None:
    node = await host.start_node()
    total = (await host.registrar.query_ledger()).total
    hits = [await node.publish_tokens(make_tokens(next(_SEEDS), total // 2)) for _ in range(2)]
    assert await node.publish_tokens(make_tokens(next(_SEEDS), 4)) is None
    part = await node.publish_tokens(make_tokens(next(_SEEDS), 4))
    assert part is None
    for hit in hits:
        assert hit is not None
        node.release_hit(hit)
    again = await node.publish_tokens(make_tokens(next(_SEEDS), 4))
    assert again is not None
    node.release_hit(again)


async def test_directory_receives_insertions_and_evictions(host: PoolTestHost) -> None:
    node = await host.start_node()
    total = (await host.registrar.query_ledger()).total
    tokens = make_tokens(next(_SEEDS), 7)
    names = {
        short_hash(name) for name in iter_block_hashes(UNSALTED_ROOT, tokens, LAYOUT.block_size)
    }
    hit = await node.publish_tokens(tokens)
    assert hit is not None
    await wait_until("told", lambda: names <= host.registrar.block_hashes)
    node.release_hit(hit)
    large = await node.publish_tokens(make_tokens(next(_SEEDS), total))
    assert large is not None
    assert len(large.blocks) == total <= OWN_BLOCKS
    await wait_until("told of evictions", lambda: not names & host.registrar.block_hashes)
    assert len(host.registrar.block_hashes) == total
    node.release_hit(large)
