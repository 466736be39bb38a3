"""A node's stream at the pool: its end when the node takes no more answers or one fails, and what
it says that is no number."""

import asyncio
import math
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.kv.block_hash import BlockHash
from baton.pb import pool_pb2 as pb
from kv_pool.core.blocks.attachments import PoolMatch
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.service import link_service as service
from kv_pool.service.pool_manager import PoolManager
from kv_pool.service.requests import PoolClientSession, PrefixQuery


class FakeNodeStream:
    """A node that asks nothing, and whose connection `write` is about."""

    def __init__(self, write: Any) -> None:
        self.write = write

    async def read(self) -> None:
        await asyncio.Event().wait()


def make_stream(write: Any, **asked: Any) -> service._ClientStream:
    pool, layout = (
        SimpleNamespace(memory=SimpleNamespace(num_blocks=1)),
        SimpleNamespace(block_size=4),
    )
    host = cast(
        PoolManager,
        SimpleNamespace(
            segment_name="baton-pool", block_pool=pool, incarnation="1", layout=layout, **asked
        ),
    )
    return service._ClientStream(
        host,
        cast(PoolClientSession, SimpleNamespace(fence=0, client_id="node")),
        FakeNodeStream(write),
    )


async def test_pool_stops_although_a_node_reads_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FLUSH_TIMEOUT_SECONDS", 0.01)
    one = make_stream(lambda _: asyncio.Event().wait())
    running = asyncio.create_task(one.run(attach_id=1))
    one.stop()
    async with asyncio.timeout(30):
        await running
    assert one.ended.is_set()


async def test_pool_stop_does_not_wait_for_a_disconnected_node() -> None:
    asked = asyncio.Event()
    gone = asyncio.Event()

    async def write(_: object) -> None:
        asked.set()
        await gone.wait()
        raise ConnectionError

    one = make_stream(write)
    running = asyncio.create_task(one.run(attach_id=1))
    await asked.wait()
    one.stop()
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(30):
            await running
    assert one.ended.is_set()


async def test_failed_answer_ends_the_stream() -> None:
    async def seal(*_: object) -> PoolMatch:
        raise ValueError("a defect")

    async def write(_: object) -> None: ...

    one = make_stream(write, seal_publication=seal)
    running = asyncio.create_task(one.run(attach_id=1))
    one._handle_question(pb.PoolQuestion(id=2, seal=pb.SealPlaces(publication=1)))
    async with asyncio.timeout(30):
        await running
    assert one.ended.is_set()


@pytest.mark.parametrize(
    ("said", "taken"), [(0.25, 0.25), (0.0, None), (-1.0, None), (math.nan, None), (math.inf, None)]
)
async def test_invalid_token_seconds_is_ignored(said: float, taken: float | None) -> None:
    asked: list[PrefixQuery] = []

    def find(_: PoolClientSession, question: PrefixQuery) -> tuple[PoolMatch, None]:
        asked.append(question)
        return PoolMatch(None, array("i")), None

    chain = PromptChain.from_tokens(BlockHash(bytes(32)), range(4), 4)
    told = pb.FindPrefix(
        chain=pb.Chain(root=chain.root_hash, names=chain.packed_hashes, tokens=chain.packed_tokens),
        token_seconds=said,
    )
    make_stream(None, find_prefix=find)._handle_question(pb.PoolQuestion(id=1, find=told))
    assert [one.compute_seconds_per_token for one in asked] == [taken]
