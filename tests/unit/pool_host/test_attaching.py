"""A node's attachment that does not come about for a reason that nobody foresaw: the pool gets its byte back, and the
node dials again. And one that outlives the pool."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from baton.addressing import AddressSpace
from baton.clock import steady
from baton.config import Config
from baton.errors import ConfigError
from baton.pb import pool_pb2 as pb
from kv_pool.attachment import Attachment, Mappings
from kv_pool.client import PoolClient
from kv_pool.client_factory import ClientParts, pool_client
from kv_pool.core.policies import POLICIES
from kv_pool.host import Applicant, PoolHost
from kv_pool.session import Session
from kv_pool.store import Store
from kv_pool.terms import PROTOCOL_VERSION
from tests.pool.rig import DIGEST, LAYOUT, client_config


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path, 1 << 20, LAYOUT)) as made:
        yield made


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddressSpace:
    """It maps nothing."""

    def attach(self: AddressSpace, segment: str) -> memoryview:
        raise ValueError(f"segment {segment} is mapped already")

    monkeypatch.setattr(AddressSpace, "attach", attach)
    return AddressSpace(LAYOUT.block_bytes, tmp_path, range_bytes=1 << 30)


def test_its_byte_is_unlocked(store: Store, space: AddressSpace, tmp_path: Path) -> None:
    byte = store.fences.mint()
    with pytest.raises(ValueError, match="mapped already"):
        Attachment(1, pb.Attached(segment=store.name, fence=byte), Mappings(space, tmp_path, LAYOUT.block_bytes))
    assert store.fences.close_off(byte)


@pytest.mark.parametrize("rate", ["0.5", "0", "-1", "much"])
def test_a_rate_that_is_none_is_told_at_start(space: AddressSpace, rate: str) -> None:
    parts = SimpleNamespace(config=Config(pool_publish_rate=rate), space=space, own=memoryview(bytearray(4096)))
    with pytest.raises(ConfigError, match=f"pool_publish_rate is '{rate}'"):
        pool_client(cast(ClientParts, parts))


@pytest.mark.asyncio
async def test_a_stream_may_end_after_the_pool(tmp_path: Path) -> None:
    host = PoolHost(tmp_path, 1 << 20, POLICIES["lru"], steady)
    desk = await host.attach(Applicant(PROTOCOL_VERSION, "node", "1", host.host_id, DIGEST.hex(), LAYOUT))
    await host.close()
    host.ended(desk)
    assert host._retry is None


@pytest.mark.asyncio
async def test_the_node_dials_again(space: AddressSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Semaphore(0)

    def session(_: object) -> Session:
        tried.release()
        raise ValueError("a defect")

    monkeypatch.setattr("kv_pool.client.Session", session)
    monkeypatch.setattr("kv_pool.client.RETRY", 0.001)
    client = PoolClient(client_config("127.0.0.1:1", tmp_path, "node"), space, memoryview(bytearray(4096)))
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(30):
        for _ in range(3):
            await tried.acquire()
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
