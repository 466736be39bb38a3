"""A pool that is told to stop does so whatever its nodes do."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.clock import steady
from baton.pb import pool_pb2 as pb
from baton.segment import host_id
from baton.wire import layout_to_pb
from kv_pool import service
from kv_pool.host import PoolHost
from kv_pool.service import PoolService
from kv_pool.terms import PROTOCOL_VERSION
from tests.pool.rig import DIGEST, LAYOUT


class Context:
    """Of a node that attaches, asks one thing, and does not take the answer."""

    def __init__(self, folder: Path) -> None:
        attach = pb.AttachPool(
            protocol_version=PROTOCOL_VERSION,
            node="decode-0",
            incarnation="a",
            host_id=host_id(folder),
            model_digest=DIGEST.hex(),
            layout=layout_to_pb(LAYOUT),
        )
        find = pb.FindPrefix(chain=pb.Chain(root=bytes(32)), max_tokens=0)
        self._questions = [pb.PoolQuestion(id=1, attach=attach), pb.PoolQuestion(id=2, find=find)]
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()

    async def read(self) -> Any:
        if self._questions:
            return self._questions.pop(0)
        self.asked.set()
        return await asyncio.Event().wait()

    async def write(self, answer: pb.PoolAnswer) -> None:
        if answer.id == 2:
            await self.gone.wait()
            raise grpc.RpcError


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "stopped"])
async def test_what_a_node_does_not_take_is_not_waited_for(
    tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not gone:
        monkeypatch.setattr(service, "_FLUSH_PATIENCE", 0.01)
    host = PoolHost(tmp_path, 2 << 20, "lru", steady)
    made, context = PoolService(host), Context(tmp_path)
    stream = asyncio.create_task(made.Attach(None, context))
    await context.asked.wait()
    drained = asyncio.create_task(made.drain())
    if gone:
        await asyncio.sleep(0)
        context.gone.set()
    async with asyncio.timeout(10):
        await asyncio.gather(drained, stream)
    host.close()
