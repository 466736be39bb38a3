"""A node's attachment that does not come about for a reason that nobody foresaw: the pool gets its
byte back, and the node dials again. And one that outlives the pool."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.pb import pool_pb2 as pb
from baton.process.clock import monotonic_clock
from baton.shared_memory.addressing import BlockAddressSpace
from kv_pool.client.connection import PoolAttachment, PoolStream, SegmentMappings
from kv_pool.client.factory import NodePoolContext, make_pool_client
from kv_pool.client.pool_client import PoolClient
from kv_pool.common.protocol import POOL_PROTOCOL_VERSION
from kv_pool.core.eviction.policies import EVICTION_POLICIES
from kv_pool.memory.segment_store import SegmentStore
from kv_pool.service.open_pool import AttachRequest
from kv_pool.service.pool_manager import PoolManager
from tests.pool.harness import DIGEST, LAYOUT, client_config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    with closing(SegmentStore(tmp_path, 1 << 20, LAYOUT)) as store:
        yield store


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlockAddressSpace:
    """It maps nothing."""

    def attach(self: BlockAddressSpace, segment: str) -> memoryview:
        raise ValueError(f"segment {segment} is mapped already")

    monkeypatch.setattr(BlockAddressSpace, "attach_segment", attach)
    return BlockAddressSpace(LAYOUT.block_bytes, tmp_path, range_bytes=1 << 30)


def test_fence_byte_is_unlocked_when_mapping_fails(
    store: SegmentStore, space: BlockAddressSpace, tmp_path: Path
) -> None:
    byte = store.fences.allocate_byte()
    with pytest.raises(ValueError, match="mapped already"):
        PoolAttachment(
            1,
            pb.Attached(segment=store.name, fence=byte),
            SegmentMappings(space, tmp_path, LAYOUT.block_bytes),
        )
    assert store.fences.try_close_byte(byte)


@pytest.mark.parametrize("rate", ["0.5", "0", "-1", "much"])
def test_invalid_publish_rate_is_rejected_at_start(space: BlockAddressSpace, rate: str) -> None:
    parts = SimpleNamespace(
        config=Config(pool_publish_rate=rate),
        address_space=space,
        own_arena=memoryview(bytearray(4096)),
    )
    with pytest.raises(ConfigError, match=f"pool_publish_rate is '{rate}'"):
        make_pool_client(cast(NodePoolContext, parts))


@pytest.mark.asyncio
async def test_stream_may_end_after_the_pool_is_closed(tmp_path: Path) -> None:
    host = PoolManager(tmp_path, 1 << 20, EVICTION_POLICIES["lru"], monotonic_clock)
    session = await host.attach_client(
        AttachRequest(POOL_PROTOCOL_VERSION, "node", "1", host.host_id, DIGEST.hex(), LAYOUT)
    )
    await host.close()
    host.on_stream_ended(session)
    assert host._removal_timer is None


@pytest.mark.asyncio
async def test_node_redials_after_an_unexpected_error(
    space: BlockAddressSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Semaphore(0)

    def session(_: object) -> PoolStream:
        tried.release()
        raise ValueError("a defect")

    monkeypatch.setattr("kv_pool.client.pool_client.PoolStream", session)
    monkeypatch.setattr("kv_pool.client.pool_client.RETRY_SECONDS", 0.001)
    client = PoolClient(
        client_config("127.0.0.1:1", tmp_path, "node"), space, memoryview(bytearray(4096))
    )
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(30):
        for _ in range(3):
            await tried.acquire()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
