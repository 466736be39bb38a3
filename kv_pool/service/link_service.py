"""PoolLink: one stream, one attachment. Questions are answered at once, but for those that wait: a
seal until its blocks have been read back, places that are not free before what was there is copied,
and a look-up of which more is on its way here, which is answered twice. So answers may come in
another order than questions."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError, InvalidRequest, ShuttingDown
from baton.kv.block_hash import BlockHash
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.process import log
from baton.process.log_rate_limit import RateLimitedLogger
from kv_pool.core.blocks.attachments import PoolMatch
from kv_pool.core.index.prompt_chain import PromptChain
from kv_pool.service.pool_manager import AttachRequest, PoolClientSession, PoolManager, PrefixQuery

_ATTACH_TIMEOUT_SECONDS = 5.0  # seconds until the first question
_FLUSH_TIMEOUT_SECONDS = (
    2.0  # seconds that a node has to take the last answers of a pool that stops
)
_MAX_UNREAD_ANSWERS = 4096  # answers; a node that leaves so many unread is given up
_MAX_SLOW_ANSWERS = (
    256  # answers that wait for something; a look-up that comes then waits for nothing
)

_limited = RateLimitedLogger()

GrpcContext = Any  # grpc.aio.ServicerContext, which ships without types


class PoolLinkService(pool_pb2_grpc.PoolLinkServicer):
    def __init__(self, host: PoolManager) -> None:
        self._manager = host
        self._streams: set[_ClientStream] = set()
        self._closing = False

    async def Attach(self, _: object, context: GrpcContext) -> None:
        """One node's stream, from AttachPool to its end."""
        first = await _read_attach(context)
        try:
            if self._closing:
                raise ShuttingDown("the pool is stopping")
            desk = await self._manager.attach_client(_attach_request_from_pb(first.attach))
        except BatonError as error:
            _limited.log_event(
                log.get_logger("pool").warning,
                "attach refused",
                node=first.attach.node,
                reason=error.message,
            )
            await context.write(pb.PoolAnswer(id=first.id, error=wire.error_to_pb(error)))
            return
        stream = _ClientStream(self._manager, desk, context)
        self._streams.add(stream)
        try:
            await stream.run(first.id)
        except grpc.RpcError:  # the node is gone
            pass
        finally:
            self._streams.discard(stream)
            self._manager.on_stream_ended(desk)

    async def drain(self) -> None:
        """Answer what was asked, take no more, and end the streams."""
        self._closing = True
        for stream in list(self._streams):
            stream.stop()
        await asyncio.gather(*(stream.ended.wait() for stream in list(self._streams)))


class _ClientStream:
    def __init__(self, host: PoolManager, desk: PoolClientSession, context: GrpcContext) -> None:
        self.ended = asyncio.Event()
        self._manager = host
        self._session = desk
        self._context = context
        self._stop_requested = asyncio.Event()
        self._answers: asyncio.Queue[pb.PoolAnswer] = asyncio.Queue(_MAX_UNREAD_ANSWERS)
        self._slow_answers: set[asyncio.Task[None]] = set()  # answers that take a while

    def stop(self) -> None:
        self._stop_requested.set()

    async def run(self, first: int) -> None:
        """Until either end ends it. Raises grpc.RpcError."""
        host, desk = self._manager, self._session
        attached = pb.Attached(
            segment=host.segment_name,
            blocks=host.block_pool.memory.num_blocks,
            fence=desk.fence,
            incarnation=host.incarnation,
        )
        self._queue_answer(first, attached=attached)
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
            finally:  # gRPC may cancel this a second time
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

    def _queue_answer(self, question: int, **answer: Any) -> None:
        try:
            self._answers.put_nowait(pb.PoolAnswer(id=question, **answer))
        except asyncio.QueueFull:
            log.get_logger("pool").error(
                "a node reads too slowly and is given up", holder=self._session.client_id
            )
            self._stop_requested.set()

    def _handle_question(self, question: pb.PoolQuestion) -> None:
        host, desk = self._manager, self._session
        match question.WhichOneof("question"):
            case "find":
                self._handle_find(question.id, question.find)
            case "release":
                host.release_pins(desk, question.release.pins)
            case "reserve":
                granted, room_made = host.reserve_blocks(
                    desk, self._chain(question.reserve.chain), question.reserve.first
                )
                places = pb.Granted(
                    publication=granted.publication_id or 0,
                    first=granted.first_block,
                    blocks=granted.blocks,
                )
                if room_made is None:
                    self._queue_answer(question.id, granted=places)
                else:
                    self._start_slow_answer(self._answer_grant(question.id, places, room_made))
            case "seal":
                seal = question.seal
                finding = partial(host.seal_publication, desk, seal.publication, seal.checksums)
                self._start_slow_answer(self._answer_match(question.id, finding))
            case "withdraw":
                host.withdraw_publication(desk, question.withdraw.publication)
            case other:
                raise InvalidRequest(f"question {other!r} cannot be asked here")

    def _handle_find(self, number: int, find: pb.FindPrefix) -> None:
        elsewhere = (
            wire.remote_prefix_from_pb(find.elsewhere) if find.HasField("elsewhere") else None
        )
        token_seconds = find.token_seconds if 0 < find.token_seconds < math.inf else None
        asked = PrefixQuery(
            self._chain(find.chain), find.max_tokens, find.partial, token_seconds, elsewhere
        )
        found, arrival = self._manager.find_prefix(self._session, asked)
        answer = _match_to_pb(found)
        if arrival is not None and len(self._slow_answers) < _MAX_SLOW_ANSWERS:
            answer.loading, answer.patience = arrival.num_blocks, arrival.max_wait_seconds
            finding = partial(
                self._manager.wait_for_more, self._session, asked, arrival, len(found.blocks)
            )
            self._start_slow_answer(self._answer_match(number, finding))
        self._queue_answer(number, found=answer)

    def _start_slow_answer(self, answering: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answering)
        self._slow_answers.add(task)
        task.add_done_callback(self._on_slow_answer_done)

    def _on_slow_answer_done(self, task: asyncio.Task[None]) -> None:
        self._slow_answers.discard(task)
        if (
            not task.cancelled() and (error := task.exception()) is not None
        ):  # else the node would wait for ever
            log.get_logger("pool").error(
                "an answer failed",
                kind=type(error).__name__,
                places=log.get_traceback_places(error),
            )
            self._stop_requested.set()

    async def _answer_grant(
        self, question: int, places: pb.Granted, room_made: Awaitable[None]
    ) -> None:
        await room_made
        self._queue_answer(question, granted=places)

    async def _answer_match(
        self, question: int, finding: Callable[[], Awaitable[PoolMatch]]
    ) -> None:
        try:
            found = await finding()
        except BatonError as error:
            self._queue_answer(question, error=wire.error_to_pb(error))
        else:
            self._queue_answer(question, found=_match_to_pb(found))

    def _chain(self, chain: pb.Chain) -> PromptChain:
        """Raises InvalidRequest."""
        return PromptChain(
            BlockHash(chain.root), chain.names, chain.tokens, self._manager.layout.block_size
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
