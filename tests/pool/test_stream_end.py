"""A node's stream at the pool: its end when the node takes no more answers or one fails, and what it says that is no
number."""

import asyncio
import math
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.block_hash import BlockHash
from baton.pb import pool_pb2 as pb
from kv_pool import service
from kv_pool.core.chain import Chain
from kv_pool.core.holders import Found
from kv_pool.host import Desk, PoolHost, Question


class Context:
    """A node that asks nothing, and whose connection `write` is about."""

    def __init__(self, write: Any) -> None:
        self.write = write

    async def read(self) -> None:
        await asyncio.Event().wait()


def stream(write: Any, **asked: Any) -> service._Stream:
    pool, layout = SimpleNamespace(memory=SimpleNamespace(total=1)), SimpleNamespace(block_size=4)
    host = cast(PoolHost, SimpleNamespace(segment="baton-pool", pool=pool, incarnation="1", layout=layout, **asked))
    return service._Stream(host, cast(Desk, SimpleNamespace(fence=0, holder="node")), Context(write))


async def test_a_node_that_takes_no_answers_does_not_keep_a_pool_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LAST_WORDS", 0.01)
    one = stream(lambda _: asyncio.Event().wait())
    running = asyncio.create_task(one.run(first=1))
    one.stop()
    async with asyncio.timeout(30):
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
        async with asyncio.timeout(30):
            await running
    assert one.ended.is_set()


async def test_an_answer_that_fails_ends_the_stream_instead_of_being_waited_for() -> None:
    async def seal(*_: object) -> Found:
        raise ValueError("a defect")

    async def write(_: object) -> None: ...

    one = stream(write, seal=seal)
    running = asyncio.create_task(one.run(first=1))
    one._answer(pb.PoolQuestion(id=2, seal=pb.SealPlaces(publication=1)))
    async with asyncio.timeout(30):
        await running
    assert one.ended.is_set()


@pytest.mark.parametrize(
    ("said", "taken"), [(0.25, 0.25), (0.0, None), (-1.0, None), (math.nan, None), (math.inf, None)]
)
async def test_a_rate_that_is_none_is_not_believed(said: float, taken: float | None) -> None:
    asked: list[Question] = []

    def find(_: Desk, question: Question) -> tuple[Found, None]:
        asked.append(question)
        return Found(None, array("i")), None

    chain = Chain.of(BlockHash(bytes(32)), range(4), 4)
    told = pb.FindPrefix(chain=pb.Chain(root=chain.root, names=chain.names, tokens=chain.tokens), token_seconds=said)
    stream(None, find=find)._answer(pb.PoolQuestion(id=1, find=told))
    assert [one.token_seconds for one in asked] == [taken]
