"""A pool with a disk behind its memory, as a real process: what memory evicts comes back, also after a restart."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from baton.block_hash import root_hash
from baton.pb.common_pb2 import Ledger
from baton.pool_terms import PoolHit
from tests.pool.conftest import Host
from tests.pool.registrar import Registrar
from tests.pool.rig import DIGEST, LAYOUT, PATIENCE, SALTLESS, Node, PoolProcess, expected, tokens_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1)
_SLOTS = 640


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


async def slots(host: Host, **counts: int) -> Ledger:
    """The disk's ledger, once it has these counts and nothing is being written or read."""
    wanted = {"writing": 0, "in_use": 0} | counts
    async with asyncio.timeout(PATIENCE):
        while True:
            await host.registrar.ledger()
            found = host.registrar.disk
            if found.total and all(getattr(found, state) == count for state, count in wanted.items()):
                return found
            await asyncio.sleep(0.02)


async def pushed_out(host: Host, node: Node, used: int) -> None:
    """Everything that was in memory is evicted, and what goes to disk is there: so many blocks."""
    total = (await host.registrar.ledger()).total
    for _ in range(4):
        await publish(node, tokens_of(next(_SEEDS), total // 4), hit=False)
    await slots(host, cached=used)


async def test_what_memory_evicts_after_a_hit_comes_back_from_disk(host: Host) -> None:
    node = await host.node()
    await slots(host, free=_SLOTS)
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
    assert (await slots(host, cached=100, free=_SLOTS - 100)).node == "pool-0 disk"
    await until("told", lambda: counter(host, "baton_pool_disk_slots_used") == 100)


async def test_what_is_on_disk_survives_the_death_of_the_pool(host: Host) -> None:
    node = await host.node()
    mine, theirs = tokens_of(next(_SEEDS), 60), tokens_of(next(_SEEDS), 60)
    salted = root_hash(DIGEST, LAYOUT, b"another tenant")
    before = (await slots(host)).cached
    await publish(node, mine)
    await publish(node, theirs, root=salted)
    await pushed_out(host, node, before + 120)
    joins = len(host.registrar.joins)
    host.pool.kill()
    await until("gone", lambda: not node.client.attached)
    host.pool.start()
    await node.attached()
    await until("joined again", lambda: len(host.registrar.joins) == joins + 1 and host.registrar.joined)
    await slots(host, cached=before + 120)
    for tokens, root, other in ((mine, SALTLESS, salted), (theirs, salted, SALTLESS)):
        assert await node.find(tokens, root=other) == PoolHit(None, ())
        found = await node.find(tokens, root=root)
        assert node.read(found) == expected(tokens)
        node.release(found)


async def test_the_first_blocks_are_read_at_once_when_the_disk_is_slow(host: Host) -> None:
    """A look-up waits for the disk only as long as computing would take."""
    node = await host.node()
    tokens = tokens_of(next(_SEEDS), 40)
    before = (await slots(host)).cached
    await publish(node, tokens)
    await pushed_out(host, node, before + 40)
    await publish(node, tokens[: 10 * LAYOUT.block_size], hit=False)
    await host.registrar.arm("pool.disk.read=delay(2)*1")
    found = await node.find(tokens, token_seconds=0.002)  # a quarter of a second for all of it
    assert node.read(found) == expected(tokens)[:10]
    node.release(found)
    await host.registrar.settled()  # it comes all the same
    found = await node.find(tokens)
    assert node.read(found) == expected(tokens)
    node.release(found)
