"""The thread that publishes, over a pool that answers as it is told."""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import pytest

from baton.errors import PeerUnreachable
from baton.kv.blocks import BlockHash, KVLayout
from baton.kv.pool_types import PoolHit, PoolPin, PublishRequest
from baton.pb import pool_pb2 as pb
from baton.process.clock import monotonic_clock
from baton.types import BlockIndex
from kv_pool.client.connection import PoolConnection
from kv_pool.client.publisher import Publisher, PublishJob
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.index.radix_index import PromptChain

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
BLOCKS = 4


class FakePoolConnection:
    """Line and attachment to a pool of BLOCKS blocks. It grants what is in `grants`, one after the
    other."""

    def __init__(self, *grants: tuple[int, ...] | Exception) -> None:
        self.grants = list(grants)
        self.rows = BlockRows(
            memoryview(bytearray(BLOCKS * LAYOUT.block_bytes)), LAYOUT.block_bytes
        )
        self.attachment = self
        self.is_detached = False
        self.num_copying = 0
        self.oneway_questions: list[str] = []

    def begin_copying(self) -> BlockRows:
        self.num_copying += 1
        return self.rows

    def end_copying(self) -> None:
        self.num_copying -= 1

    def send_and_wait(
        self, question: pb.PoolQuestion, conclude: Callable[[pb.PoolAnswer], Any]
    ) -> Any:
        if question.HasField("seal"):
            return conclude(pb.PoolAnswer(found=pb.Found(pin=1, blocks=[0, 1])))
        granted = self.grants.pop(0)
        if isinstance(granted, Exception):
            raise granted
        return conclude(pb.PoolAnswer(granted=pb.Granted(publication=7, first=0, blocks=granted)))

    def send_oneway(self, question: pb.PoolQuestion) -> None:
        self.oneway_questions.append(str(question.WhichOneof("question")))

    def register_hit(self, found: pb.Found) -> PoolHit:
        return PoolHit(PoolPin(1, found.pin), tuple(map(BlockIndex, found.blocks)))


@pytest.mark.parametrize(
    "wrong", [(0, BLOCKS), PeerUnreachable("the pool is gone"), ValueError("a defect")]
)
def test_failed_publication_does_not_end_the_thread(wrong: tuple[int, ...] | Exception) -> None:
    """A place that the pool does not have, a pool that goes, and what nobody foresaw."""
    pool, ends, ended = (
        FakePoolConnection(wrong, (0, 1)),
        list[PoolHit | None](),
        threading.Semaphore(0),
    )

    def conclude(_: PublishJob, hit: PoolHit | None) -> None:
        ends.append(hit)
        ended.release()

    own = memoryview(bytearray(b"\5" * 2 * LAYOUT.block_bytes))
    publisher = Publisher(
        own,
        LAYOUT,
        1e9,
        lambda: cast(PoolConnection, pool),
        conclude,
        lambda call: call(),
        monotonic_clock,
    )
    chain = PromptChain.from_tokens(BlockHash(bytes(32)), range(8), LAYOUT.block_size)
    order = PublishRequest(
        chain.root_hash, chain.packed_hashes, chain.packed_tokens, 0, (0, 1), lambda _: None
    )
    publisher.start()
    with closing(publisher):
        for _ in range(2):
            assert publisher.add_request(order)
            assert ended.acquire(timeout=30)
    assert ends == [None, PoolHit(PoolPin(1, 1), (BlockIndex(0), BlockIndex(1)))]
    assert bytes(pool.rows.row(1)) == bytes(own[LAYOUT.block_bytes :])
    assert pool.num_copying == 0
    assert pool.oneway_questions == (["withdraw"] if isinstance(wrong, tuple) else [])
