"""A node's stream to its pool: questions and their answers. Belongs to one event loop."""

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from baton.cluster_link.pb_conversion import error_from_pb, layout_to_pb
from baton.errors import BatonError, PeerUnreachable
from baton.pb import pool_pb2_grpc
from baton.pb.pool_pb2 import Attached, AttachPool, PoolAnswer, PoolQuestion
from kv_pool.common.protocol import (
    ATTACH_TIMEOUT_SECONDS,
    POOL_PROTOCOL_VERSION,
    PoolClientConfig,
)

_MAX_UNSENT = 256  # questions; with so many queued, new questions fail
_MAX_UNANSWERED = 4096  # questions; likewise


@dataclass(frozen=True, slots=True)
class _PendingAnswer:
    """A question that has no answer yet."""

    answer: "asyncio.Future[PoolAnswer]"
    second_answer: "asyncio.Future[PoolAnswer] | None"  # if the first one announces it


class PoolStream:
    """One gRPC stream to the pool, from its opening to its end."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = pool_pb2_grpc.PoolLinkStub(channel).Attach()
        self._ids = count(1)
        self._unsent: asyncio.Queue[PoolQuestion] = asyncio.Queue(_MAX_UNSENT)
        self._pending: dict[int, _PendingAnswer] = {}
        self._is_closed = False

    async def attach(self, config: PoolClientConfig, incarnation: str) -> Attached:
        """Attach this node; returns the pool's answer.

        Raises the pool's refusal, PeerUnreachable, or TimeoutError after ATTACH_TIMEOUT_SECONDS.
        """
        attach = AttachPool(
            protocol_version=POOL_PROTOCOL_VERSION,
            node=config.node,
            incarnation=incarnation,
            host_id=config.host_id,
            model_digest=config.model_digest,
            layout=layout_to_pb(config.layout),
        )
        async with asyncio.timeout(ATTACH_TIMEOUT_SECONDS):
            return (await self.send_question(PoolQuestion(attach=attach))).attached

    def send_question(
        self, question: PoolQuestion, second_answer: "asyncio.Future[PoolAnswer] | None" = None
    ) -> "asyncio.Future[PoolAnswer]":
        """Send a question; returns the future of its answer.

        Futures complete in the order of the pool's answers. They fail with the error that the pool
        answers, or with PeerUnreachable when the stream ends first or cannot take the question.
        `second_answer` gets a second answer, if the first one announces it.
        """
        answer: asyncio.Future[PoolAnswer] = asyncio.get_running_loop().create_future()
        question.id = next(self._ids)
        if (
            self._is_closed
            or len(self._pending) >= _MAX_UNANSWERED
            or not self._queue_question(question)
        ):
            answer.set_exception(PeerUnreachable("pool connection lost or too slow"))
        else:
            self._pending[question.id] = _PendingAnswer(answer, second_answer)
        return answer

    def send_oneway(self, question: PoolQuestion) -> None:
        """Send a question that has no answer.

        A stream that cannot take it is closed; the pool then learns from the fence byte that the
        attachment has ended.
        """
        question.id = next(self._ids)
        if not self._is_closed and not self._queue_question(question):
            self._call.cancel()

    async def run(self) -> None:
        """Read answers until the stream ends."""
        writer = asyncio.create_task(self._write())
        reason = "pool connection lost"
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                self._on_answer(answer)
        except grpc.aio.AioRpcError as error:
            reason = f"pool connection lost ({error.code().name}: {error.details()})"
        finally:
            writer.cancel()
            self.close(reason)

    async def send_goodbye(self) -> None:
        """Detach after all that was sent; returns when the pool has ended the stream."""
        self.send_oneway(PoolQuestion(goodbye={}))
        await self._call.code()

    def close(self, reason: str) -> None:
        """Cancel the stream and fail all unanswered questions. Idempotent."""
        self._is_closed = True
        self._call.cancel()
        unanswered, self._pending = self._pending, {}
        for pending in unanswered.values():
            _fail(pending.answer, PeerUnreachable(reason))

    def _queue_question(self, question: PoolQuestion) -> bool:
        try:
            self._unsent.put_nowait(question)
        except asyncio.QueueFull:
            return False
        return True

    async def _write(self) -> None:
        while True:
            question = await self._unsent.get()
            try:
                await self._call.write(question)
            except (asyncio.InvalidStateError, grpc.RpcError):
                return  # the stream has ended; `run` reports the reason

    def _on_answer(self, answer: PoolAnswer) -> None:
        pending = self._pending.pop(answer.id, None)
        if pending is None:
            return
        if pending.second_answer is not None and answer.found.loading:
            self._pending[answer.id] = _PendingAnswer(pending.second_answer, None)
        if answer.HasField("error"):
            _fail(pending.answer, error_from_pb(answer.error))
        elif not pending.answer.done():
            pending.answer.set_result(answer)


def _fail(answer: "asyncio.Future[PoolAnswer]", error: BatonError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # mark as retrieved: the caller may not wait for it any more
