"""A pool whose memory is full."""

from itertools import count

import pytest

from baton.block_hash import chain, short_name
from tests.pool.conftest import Host
from tests.pool.rig import LAYOUT, OWN_BLOCKS, SALTLESS, expected, tokens_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {"pool_eviction": "lru"}
_SEEDS = count(1)


async def test_memory_that_is_full_makes_room_and_keeps_what_is_pinned(host: Host) -> None:
    node = await host.node()
    total = (await host.registrar.ledger()).total
    kept_tokens = tokens_of(next(_SEEDS), total // 4)
    kept = await node.publish(kept_tokens)
    assert kept is not None
    for _ in range(8):
        hit = await node.publish(tokens_of(next(_SEEDS), total // 4))
        assert hit is not None
        assert len(hit.blocks) == total // 4
        node.release(hit)
    assert node.read(kept) == expected(kept_tokens)
    await until("evictions told", lambda: host.registrar.stats.counters['baton_pool_evictions_total{tier="memory"}'])
    node.release(kept)


async def test_all_pinned_is_no_room_and_no_error(host: Host) -> None:
    node = await host.node()
    total = (await host.registrar.ledger()).total
    hits = [await node.publish(tokens_of(next(_SEEDS), total // 2)) for _ in range(2)]
    assert await node.publish(tokens_of(next(_SEEDS), 4)) is None
    part = await node.publish(tokens_of(next(_SEEDS), 4))
    assert part is None
    for hit in hits:
        assert hit is not None
        node.release(hit)
    again = await node.publish(tokens_of(next(_SEEDS), 4))
    assert again is not None
    node.release(again)


async def test_the_directory_hears_what_the_pool_gains_and_loses(host: Host) -> None:
    node = await host.node()
    total = (await host.registrar.ledger()).total
    tokens = tokens_of(next(_SEEDS), 7)
    names = {short_name(name) for name in chain(SALTLESS, tokens, LAYOUT.block_size)}
    hit = await node.publish(tokens)
    assert hit is not None
    await until("told", lambda: names <= host.registrar.names)
    node.release(hit)
    large = await node.publish(tokens_of(next(_SEEDS), total))
    assert large is not None
    assert len(large.blocks) == total <= OWN_BLOCKS
    await until("told of evictions", lambda: not names & host.registrar.names)
    assert len(host.registrar.names) == total
    node.release(large)
