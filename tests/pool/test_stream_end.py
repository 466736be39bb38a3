"""The end of a node's stream at the pool, when the node takes no more answers."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_pool import service
from kv_pool.host import Desk, PoolHost


class Context:
    """A node that asks nothing, and whose connection `write` is about."""

    def __init__(self, write: Any) -> None:
        self.write = write

    async def read(self) -> None:
        await asyncio.Event().wait()


def stream(write: Any) -> service._Stream:
    pool = SimpleNamespace(memory=SimpleNamespace(total=1))
    host = cast(PoolHost, SimpleNamespace(segment="baton-pool", pool=pool, incarnation="1"))
    return service._Stream(host, cast(Desk, SimpleNamespace(fence=0, holder="node")), Context(write))


async def test_a_node_that_takes_no_answers_does_not_keep_a_pool_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LAST_WORDS", 0.01)
    one = stream(lambda _: asyncio.Event().wait())
    running = asyncio.create_task(one.run(first=1))
    one.stop()
    async with asyncio.timeout(10):
        await running
    assert one.ended.is_set()


async def test_a_node_that_is_gone_when_a_pool_stops_is_not_waited_for() -> None:
    asked = asyncio.Event()
    gone = asyncio.Event()

    async def write(_: object) -> None:
        asked.set()
        await gone.wait()
        raise ConnectionError

    one = stream(write)
    running = asyncio.create_task(one.run(first=1))
    await asked.wait()
    one.stop()
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(10):
            await running
    assert one.ended.is_set()
