"""A pool with a disk behind its memory, as a real process: what memory evicts comes back, also after a restart."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from baton.pool_terms import PoolHit
from tests.pool.conftest import Host
from tests.pool.registrar import Registrar
from tests.pool.rig import LAYOUT, Node, PoolProcess, expected, tokens_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1)
_SLOTS = 640
_USED = "baton_pool_disk_slots_used"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    disk = tmp_path_factory.mktemp("disk")
    size = 4096 + _SLOTS * LAYOUT.block_bytes
    settings = {"pool_eviction": "lru", "pool_disk": size, "pool_disk_dir": disk}
    try:
        async with Registrar.open() as registrar:
            with PoolProcess(folder, coordinator=registrar.address, name="pool-0", **settings) as pool:
                yield Host(pool, registrar, folder)
        assert os.listdir(folder) == [], "segments were left behind"
        assert sorted(path.name for path in disk.iterdir()) == ["pool-disk.journal", "pool-disk.kv"]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in disk.iterdir())
    finally:
        shutil.rmtree(folder)


def counter(host: Host, name: str) -> float:
    return host.registrar.stats.counters[name]


async def publish(node: Node, tokens: tuple[int, ...], *, hit: bool = True, **more: object) -> None:
    published = await node.publish(tokens, **more)
    assert published is not None
    node.release(published)
    if hit:
        node.release(await node.find(tokens, **more))


async def pushed_out(host: Host, node: Node, used: int) -> None:
    """Everything that was in memory is evicted, and what goes to disk is there: so many blocks."""
    total = (await host.registrar.ledger()).total
    for _ in range(4):
        await publish(node, tokens_of(next(_SEEDS), total // 4), hit=False)
    await until("on disk", lambda: counter(host, _USED) == used)


async def test_what_memory_evicts_after_a_hit_comes_back_from_disk(host: Host) -> None:
    node = await host.node()
    await until("disk ready", lambda: counter(host, "baton_pool_disk_slots") == _SLOTS)
    tokens, never_hit = tokens_of(next(_SEEDS), 100, extra=3), tokens_of(next(_SEEDS), 50)
    await publish(node, tokens)
    await publish(node, never_hit, hit=False)
    await pushed_out(host, node, 100)
    found = await node.find(tokens)
    assert node.read(found) == expected(tokens)
    node.release(found)
    assert await node.find(never_hit) == PoolHit(None, ())
    await until("told", lambda: counter(host, 'baton_pool_found_blocks_total{tier="disk"}') == 100)
    await host.registrar.settled()
