"""The gRPC service PoolLink: one stream per attachment, with a node's questions and their answers.

Most questions are answered at once. A seal is answered after its blocks have been verified, and a
reservation after the blocks that it evicts have been copied. A look-up whose next blocks are
pending is answered twice. So answers may come in another order than questions.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import remote_prefix_from_pb
from baton.errors import BatonError, InvalidRequest, ShuttingDown
from baton.kv.blocks import BlockHash
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from kv_pool.core.blocks.attachments import PoolMatch
from kv_pool.core.index.radix_index import PromptChain
from kv_pool.service.open_pool import AttachRequest, PrefixQuery
from kv_pool.service.pool_manager import PoolClientSession, PoolManager

_ATTACH_TIMEOUT_SECONDS = 5.0  # from the start of a stream to its first question
_FLUSH_TIMEOUT_SECONDS = 2.0  # for a node to read the last answers of a pool that stops
_MAX_UNREAD_ANSWERS = 4096  # the stream of a node that leaves so many unread is closed
_MAX_SLOW_ANSWERS = 256  # per stream; with more, look-ups do not wait for pending blocks

_limited = RateLimitedLogger()

GrpcContext = Any  # grpc.aio.ServicerContext, which ships without types


class PoolLinkService(pool_pb2_grpc.PoolLinkServicer):
    """The gRPC service that nodes attach to, with the streams of all nodes."""

    def __init__(self, manager: PoolManager) -> None:
        self._manager = manager
        self._streams: set[_ClientStream] = set()
        self._closing = False

    async def Attach(self, _: object, context: GrpcContext) -> None:
        """Serve one node's stream, from AttachPool to its end."""
        first = await _read_attach(context)
        try:
            if self._closing:
                raise ShuttingDown("the pool is stopping")
            session = await self._manager.attach_client(_attach_request_from_pb(first.attach))
        except BatonError as error:
            _limited.log_event(
                log.get_logger("pool").warning,
                "node refused by the pool",
                node=first.attach.node,
                reason=error.message,
            )
            await context.write(pb.PoolAnswer(id=first.id, error=wire.error_to_pb(error)))
            return
        stream = _ClientStream(self._manager, session, context)
        self._streams.add(stream)
        try:
            await stream.run(first.id)
        except grpc.RpcError:  # the node has disconnected
            pass
        finally:
            self._streams.discard(stream)
            self._manager.on_stream_ended(session)

    async def drain(self) -> None:
        """Answer the questions received so far, accept no more, and end all streams."""
        self._closing = True
        for stream in list(self._streams):
            stream.stop()
        await asyncio.gather(*(stream.ended.wait() for stream in list(self._streams)))


class _ClientStream:
    """One node's stream after it has attached."""

    def __init__(
        self, manager: PoolManager, session: PoolClientSession, context: GrpcContext
    ) -> None:
        self.ended = asyncio.Event()
        self._manager = manager
        self._session = session
        self._context = context
        self._stop_requested = asyncio.Event()
        self._answers: asyncio.Queue[pb.PoolAnswer] = asyncio.Queue(_MAX_UNREAD_ANSWERS)
        self._slow_answers: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        self._stop_requested.set()

    async def run(self, attach_id: int) -> None:
        """Serve the stream until either side ends it. Raises grpc.RpcError.

        `attach_id` is the id of the question AttachPool, which is answered first.
        """
        pool = self._manager.open_pool
        attached = pb.Attached(
            segment=pool.store.name,
            blocks=pool.block_pool.memory.num_blocks,
            fence=self._session.fence_byte,
            incarnation=self._manager.incarnation,
        )
        self._queue_answer(attach_id, attached=attached)
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        stopped = asyncio.create_task(self._stop_requested.wait())
        tasks: set[asyncio.Task[Any]] = {writer, reader, stopped}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not reader.done():
                flushed = asyncio.create_task(self._flush())
                tasks.add(flushed)
                await asyncio.wait(
                    {flushed, writer},
                    timeout=_FLUSH_TIMEOUT_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            for task in (writer, reader):
                if task.done():
                    task.result()
        finally:
            tasks |= self._slow_answers
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also if gRPC cancels this a second time
                self.ended.set()

    async def _read(self) -> None:
        while (question := await self._context.read()) is not grpc.aio.EOF:
            if question.HasField("goodbye"):
                return
            try:
                self._handle_question(question)
            except BatonError as error:
                self._queue_answer(question.id, error=wire.error_to_pb(error))

    async def _write(self) -> None:
        while True:
            answer = await self._answers.get()
            await self._context.write(answer)
            self._answers.task_done()

    async def _flush(self) -> None:
        if self._slow_answers:
            await asyncio.wait(self._slow_answers)
        await self._answers.join()

    def _queue_answer(self, question_id: int, **answer: Any) -> None:
        try:
            self._answers.put_nowait(pb.PoolAnswer(id=question_id, **answer))
        except asyncio.QueueFull:
            log.get_logger("pool").error(
                "send queue to a pool client full, closing its stream",
                client_id=self._session.client_id,
            )
            self._stop_requested.set()

    def _handle_question(self, question: pb.PoolQuestion) -> None:
        """Answer one question, or start a task that does. Raises BatonError."""
        session = self._session
        match question.WhichOneof("question"):
            case "find":
                self._handle_find(question.id, question.find)
            case "release":
                session.release_pins(question.release.pins)
            case "reserve":
                granted, demoted = session.reserve_blocks(
                    self._chain(question.reserve.chain), question.reserve.first
                )
                answer = pb.Granted(
                    publication=granted.publication_id or 0,
                    first=granted.first_block,
                    blocks=granted.blocks,
                )
                if demoted is None:
                    self._queue_answer(question.id, granted=answer)
                else:
                    self._start_slow_answer(self._answer_grant(question.id, answer, demoted))
            case "seal":
                seal = question.seal
                get_match = partial(session.seal_publication, seal.publication, seal.checksums)
                self._start_slow_answer(self._answer_match(question.id, get_match))
            case "withdraw":
                session.withdraw_publication(question.withdraw.publication)
            case other:
                raise InvalidRequest(f"question {other!r} cannot be asked here")

    def _handle_find(self, question_id: int, find: pb.FindPrefix) -> None:
        remote_prefix = (
            remote_prefix_from_pb(find.elsewhere) if find.HasField("elsewhere") else None
        )
        token_seconds = find.token_seconds if 0 < find.token_seconds < math.inf else None
        query = PrefixQuery(
            self._chain(find.chain), find.max_tokens, find.partial, token_seconds, remote_prefix
        )
        found, pending = self._session.find_prefix(query)
        answer = _match_to_pb(found)
        if pending is not None and len(self._slow_answers) < _MAX_SLOW_ANSWERS:
            answer.loading, answer.patience = pending.num_blocks, pending.max_wait_seconds
            get_match = partial(self._session.wait_for_more, query, pending, len(found.blocks))
            self._start_slow_answer(self._answer_match(question_id, get_match))
        self._queue_answer(question_id, found=answer)

    def _start_slow_answer(self, answer: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answer)
        self._slow_answers.add(task)
        task.add_done_callback(self._on_slow_answer_done)

    def _on_slow_answer_done(self, task: asyncio.Task[None]) -> None:
        self._slow_answers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The stream is closed, because the node would wait for the answer for ever.
            log.get_logger("pool").error(
                "pool request failed",
                error_type=type(error).__name__,
                traceback=log.get_traceback_frames(error),
            )
            self._stop_requested.set()

    async def _answer_grant(
        self, question_id: int, granted: pb.Granted, demoted: Awaitable[None]
    ) -> None:
        await demoted
        self._queue_answer(question_id, granted=granted)

    async def _answer_match(
        self, question_id: int, get_match: Callable[[], Awaitable[PoolMatch]]
    ) -> None:
        try:
            found = await get_match()
        except BatonError as error:
            self._queue_answer(question_id, error=wire.error_to_pb(error))
        else:
            self._queue_answer(question_id, found=_match_to_pb(found))

    def _chain(self, chain: pb.Chain) -> PromptChain:
        """Convert a chain. Raises InvalidRequest."""
        return PromptChain(
            BlockHash(chain.root),
            chain.names,
            chain.tokens,
            self._manager.open_pool.layout.block_size,
        )


async def _read_attach(context: GrpcContext) -> pb.PoolQuestion:
    try:
        async with asyncio.timeout(_ATTACH_TIMEOUT_SECONDS):
            message = await context.read()
    except TimeoutError:
        await context.abort(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"no question within {_ATTACH_TIMEOUT_SECONDS:g} s"
        )
    if message is grpc.aio.EOF or not message.HasField("attach"):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the first question must be AttachPool"
        )
    return message  # type: ignore[no-any-return]


def _attach_request_from_pb(attach: pb.AttachPool) -> AttachRequest:
    return AttachRequest(
        protocol_version=attach.protocol_version,
        node=attach.node[:128],
        incarnation=attach.incarnation,
        host_id=attach.host_id,
        model_digest=attach.model_digest,
        layout=wire.layout_from_pb(attach.layout),
    )


def _match_to_pb(found: PoolMatch) -> pb.Found:
    block, tokens = found.partial_block or (0, 0)
    return pb.Found(
        pin=found.pin_id or 0,
        blocks=found.blocks,
        partial_block=block,
        partial_tokens=tokens,
        remote=found.remote_blocks,
    )
