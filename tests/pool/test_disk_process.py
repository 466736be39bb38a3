"""A pool with a disk, as a real process: what memory evicts is read back, also after a restart."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton.kv.blocks import root_hash
from baton.kv.pool_types import PoolHit
from baton.pb.common_pb2 import Ledger
from tests.pool.conftest import PoolTestHost
from tests.pool.fake_coordinator import FakePoolCoordinator
from tests.pool.harness import (
    DIGEST,
    LAYOUT,
    TIMEOUT_SECONDS,
    UNSALTED_ROOT,
    PoolNode,
    PoolProcess,
    expected_blocks,
    make_tokens,
    wait_until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SEEDS = count(1)
_SLOTS = 640


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PoolTestHost]:
    folder = Path(tempfile.mkdtemp(prefix="baton-test-pool-", dir="/dev/shm"))
    disk = tmp_path_factory.mktemp("disk")
    size = 4096 + _SLOTS * LAYOUT.block_bytes
    settings = {"pool_eviction": "lru", "pool_disk": size, "pool_disk_dir": disk}
    try:
        async with FakePoolCoordinator.open() as registrar:
            with PoolProcess(
                folder, coordinator=registrar.address, name="pool-0", **settings
            ) as pool:
                yield PoolTestHost(pool, registrar, folder)
        assert os.listdir(folder) == [], "segments were left behind"
        assert sorted(path.name for path in disk.iterdir()) == ["pool-disk.journal", "pool-disk.kv"]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in disk.iterdir())
    finally:
        shutil.rmtree(folder)


def read_counter(host: PoolTestHost, name: str) -> float:
    return host.registrar.stats.counters[name]


async def publish_and_release(
    node: PoolNode, tokens: tuple[int, ...], *, hit: bool = True, **more: Any
) -> None:
    published = await node.publish_tokens(tokens, **more)
    assert published is not None
    node.release_hit(published)
    if hit:
        node.release_hit(await node.find_prefix(tokens, **more))


async def wait_for_disk_ledger(host: PoolTestHost, **counts: int) -> Ledger:
    """Return the disk's ledger once it has these counts and nothing is being written or read."""
    expected = {"writing": 0, "in_use": 0} | counts
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            await host.registrar.query_ledger()
            found = host.registrar.disk_ledger
            if found.total and all(
                getattr(found, state) == count for state, count in expected.items()
            ):
                return found
            await asyncio.sleep(0.02)


async def evict_all_from_memory(host: PoolTestHost, node: PoolNode, used: int) -> None:
    """Evict everything from memory, and wait until so many blocks are on disk."""
    total = (await host.registrar.query_ledger()).total
    for _ in range(4):
        await publish_and_release(node, make_tokens(next(_SEEDS), total // 4), hit=False)
    await wait_for_disk_ledger(host, cached=used)


async def test_hit_blocks_evicted_from_memory_are_loaded_from_disk(host: PoolTestHost) -> None:
    node = await host.start_node()
    await wait_for_disk_ledger(host, free=_SLOTS)
    tokens, never_hit = make_tokens(next(_SEEDS), 100, extra=3), make_tokens(next(_SEEDS), 50)
    await publish_and_release(node, tokens)
    await publish_and_release(node, never_hit, hit=False)
    await evict_all_from_memory(host, node, 100)
    found = await node.find_prefix(tokens)
    assert node.read_blocks(found) == expected_blocks(tokens)
    node.release_hit(found)
    assert await node.find_prefix(never_hit) == PoolHit(None, ())
    await wait_until(
        "told", lambda: read_counter(host, 'baton_pool_found_blocks_total{tier="disk"}') == 100
    )
    await host.registrar.wait_for_ledger()
    assert (await wait_for_disk_ledger(host, cached=100, free=_SLOTS - 100)).node == "pool-0 disk"
    await wait_until("told", lambda: read_counter(host, "baton_pool_disk_slots_used") == 100)


async def test_disk_contents_survive_a_pool_crash(host: PoolTestHost) -> None:
    node = await host.start_node()
    mine, theirs = make_tokens(next(_SEEDS), 60), make_tokens(next(_SEEDS), 60)
    salted = root_hash(DIGEST, LAYOUT, b"another tenant")
    before = (await wait_for_disk_ledger(host)).cached
    await publish_and_release(node, mine)
    await publish_and_release(node, theirs, root=salted)
    await evict_all_from_memory(host, node, before + 120)
    joins = len(host.registrar.joins)
    host.pool.kill()
    await wait_until("gone", lambda: not node.client.is_attached)
    host.pool.start()
    await node.wait_until_attached()
    await wait_until(
        "joined again", lambda: len(host.registrar.joins) == joins + 1 and host.registrar.is_joined
    )
    await wait_for_disk_ledger(host, cached=before + 120)
    for tokens, root, other in ((mine, UNSALTED_ROOT, salted), (theirs, salted, UNSALTED_ROOT)):
        assert await node.find_prefix(tokens, root=other) == PoolHit(None, ())
        found = await node.find_prefix(tokens, root=root)
        assert node.read_blocks(found) == expected_blocks(tokens)
        node.release_hit(found)


async def test_the_first_blocks_are_read_at_once_when_the_disk_is_slow(host: PoolTestHost) -> None:
    """A look-up waits for the disk only as long as computing would take."""
    node = await host.start_node()
    tokens = make_tokens(next(_SEEDS), 40)
    before = (await wait_for_disk_ledger(host)).cached
    await publish_and_release(node, tokens)
    await evict_all_from_memory(host, node, before + 40)
    await publish_and_release(node, tokens[: 10 * LAYOUT.block_size], hit=False)
    await host.registrar.arm_failpoints("pool.disk.read=delay(2)*1")
    found = await node.find_prefix(
        tokens, token_seconds=0.002
    )  # a quarter of a second for all of it
    assert node.read_blocks(found) == expected_blocks(tokens)[:10]
    node.release_hit(found)
    await host.registrar.wait_for_ledger()  # it comes all the same
    found = await node.find_prefix(tokens)
    assert node.read_blocks(found) == expected_blocks(tokens)
    node.release_hit(found)
