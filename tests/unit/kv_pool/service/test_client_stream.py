"""A node's stream at the pool: its end when the node takes no more answers or one fails, and what
it says that is no number."""

import asyncio
import math
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.kv.blocks import BlockHash
from baton.pb import pool_pb2 as pb
from kv_pool.core.blocks.attachments import PoolMatch
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.service import link_service as service
from kv_pool.service.open_pool import PrefixQuery
from kv_pool.service.pool_manager import PoolClientSession, PoolManager


class FakeNodeStream:
    """A node that asks nothing, and whose connection `write` is about."""

    def __init__(self, write: Any) -> None:
        self.write = write

    async def read(self) -> None:
        await asyncio.Event().wait()


def make_stream(write: Any, **methods: Any) -> service._ClientStream:
    """A stream whose session has the given methods."""
    open_pool = SimpleNamespace(
        store=SimpleNamespace(name="baton-pool"),
        block_pool=SimpleNamespace(memory=SimpleNamespace(num_blocks=1)),
        layout=SimpleNamespace(block_size=4),
    )
    session = SimpleNamespace(fence_byte=0, client_id="node", **methods)
    return service._ClientStream(
        cast(PoolManager, SimpleNamespace(open_pool=open_pool, incarnation="1")),
        cast(PoolClientSession, session),
        FakeNodeStream(write),
    )


async def test_pool_stops_although_a_node_reads_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FLUSH_TIMEOUT_SECONDS", 0.01)
    stream = make_stream(lambda _: asyncio.Event().wait())
    running = asyncio.create_task(stream.run(attach_id=1))
    stream.stop()
    async with asyncio.timeout(30):
        await running
    assert stream.ended.is_set()


async def test_pool_stop_does_not_wait_for_a_disconnected_node() -> None:
    written = asyncio.Event()
    gone = asyncio.Event()

    async def write(_: object) -> None:
        written.set()
        await gone.wait()
        raise ConnectionError

    stream = make_stream(write)
    running = asyncio.create_task(stream.run(attach_id=1))
    await written.wait()
    stream.stop()
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(30):
            await running
    assert stream.ended.is_set()


async def test_failed_answer_ends_the_stream() -> None:
    async def seal(*_: object) -> PoolMatch:
        raise ValueError("a defect")

    async def write(_: object) -> None: ...

    stream = make_stream(write, seal_publication=seal)
    running = asyncio.create_task(stream.run(attach_id=1))
    stream._handle_question(pb.PoolQuestion(id=2, seal=pb.SealPlaces(publication=1)))
    async with asyncio.timeout(30):
        await running
    assert stream.ended.is_set()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(0.25, 0.25), (0.0, None), (-1.0, None), (math.nan, None), (math.inf, None)],
)
async def test_invalid_token_seconds_is_ignored(sent: float, expected: float | None) -> None:
    queries: list[PrefixQuery] = []

    def find_prefix(query: PrefixQuery) -> tuple[PoolMatch, None]:
        queries.append(query)
        return PoolMatch(None, array("i")), None

    chain = PromptChain.from_tokens(BlockHash(bytes(32)), range(4), 4)
    find = pb.FindPrefix(
        chain=pb.Chain(root=chain.root_hash, names=chain.packed_hashes, tokens=chain.packed_tokens),
        token_seconds=sent,
    )
    make_stream(None, find_prefix=find_prefix)._handle_question(pb.PoolQuestion(id=1, find=find))
    assert [query.compute_seconds_per_token for query in queries] == [expected]
