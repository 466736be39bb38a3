"""One stream to the pool, as questions and answers. Belongs to one event loop."""

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from baton.cluster_link.pb_conversion import error_from_pb
from baton.errors import BatonError, PeerUnreachable
from baton.pb import pool_pb2_grpc
from baton.pb.pool_pb2 import PoolAnswer, PoolQuestion

_MAX_UNSENT = 256  # questions; a pool that leaves so many unread is asked no more
_MAX_UNANSWERED = 4096


@dataclass(frozen=True, slots=True)
class _PendingAnswer:
    """A question without its answer."""

    answer: "asyncio.Future[PoolAnswer]"
    second_answer: "asyncio.Future[PoolAnswer] | None"


class PoolStream:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = pool_pb2_grpc.PoolLinkStub(channel).Attach()
        self._ids = count(1)
        self._unsent: asyncio.Queue[PoolQuestion] = asyncio.Queue(_MAX_UNSENT)
        self._pending: dict[int, _PendingAnswer] = {}
        self._is_closed = False

    def send_question(
        self, question: PoolQuestion, more: "asyncio.Future[PoolAnswer] | None" = None
    ) -> "asyncio.Future[PoolAnswer]":
        """The answers' futures are done in the order in which the pool gave them; with PeerGone
        when the stream ends first, or is too slow to take the question, and with what the pool says
        if it refuses. `more` is for a second answer, if the first one says that there will be
        one."""
        answer: asyncio.Future[PoolAnswer] = asyncio.get_running_loop().create_future()
        question.id = next(self._ids)
        if (
            self._is_closed
            or len(self._pending) >= _MAX_UNANSWERED
            or not self._queue_question(question)
        ):
            answer.set_exception(PeerUnreachable("the pool is gone or too slow"))
        else:
            self._pending[question.id] = _PendingAnswer(answer, more)
        return answer

    def send_oneway(self, question: PoolQuestion) -> None:
        """What has no answer. A stream that cannot take it is given up: the pool learns all from
        the byte then."""
        question.id = next(self._ids)
        if not self._is_closed and not self._queue_question(question):
            self._call.cancel()

    async def run(self) -> None:
        """Until the stream ends."""
        writer = asyncio.create_task(self._write())
        reason = "the pool is gone"
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                self._on_answer(answer)
        except grpc.aio.AioRpcError as error:
            reason = f"the pool is gone ({error.code().name}: {error.details()})"
        finally:
            writer.cancel()
            self.close(reason)

    async def send_goodbye(self) -> None:
        """After everything that was told; returns when the pool has heard it, or the stream is
        broken anyway."""
        self.send_oneway(PoolQuestion(goodbye={}))
        await self._call.code()

    def close(self, reason: str) -> None:
        """Idempotent."""
        self._is_closed = True
        self._call.cancel()
        waiting, self._pending = self._pending, {}
        for question in waiting.values():
            _fail(question.answer, PeerUnreachable(reason))

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
            except (
                asyncio.InvalidStateError,
                grpc.RpcError,
            ):  # the stream has ended: the reader is told how
                return

    def _on_answer(self, answer: PoolAnswer) -> None:
        question = self._pending.pop(answer.id, None)
        if question is None:
            return
        if question.second_answer is not None and answer.found.loading:
            self._pending[answer.id] = _PendingAnswer(question.second_answer, None)
        if answer.HasField("error"):
            _fail(question.answer, error_from_pb(answer.error))
        elif not question.answer.done():
            question.answer.set_result(answer)


def _fail(answer: "asyncio.Future[PoolAnswer]", error: BatonError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # whoever asked may have gone: then nobody else looks at it
