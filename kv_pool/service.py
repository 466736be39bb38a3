"""PoolLink: one stream, one attachment. Questions are answered at once, but for those that wait: a seal until its
blocks have been read back, places that are not free before what was there is copied, and a look-up of which more is on
its way here, which is answered twice. So answers may come in another order than questions."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from baton import log, wire
from baton.block_hash import BlockHash
from baton.errors import BatonError, Draining, InvalidRequest
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.process.log_rate import RateLimitedLog
from kv_pool.core.chain import Chain
from kv_pool.core.holders import Found
from kv_pool.host import Applicant, Desk, PoolHost, Question

_FIRST_TIMEOUT = 5.0  # seconds until the first question
_LAST_WORDS = 2.0  # seconds that a node has to take the last answers of a pool that stops
_UNREAD = 4096  # answers; a node that leaves so many unread is given up
_SLOW = 256  # answers that wait for something; a look-up that comes then waits for nothing

_limited = RateLimitedLog()

Context = Any  # grpc.aio.ServicerContext, which ships without types


class PoolService(pool_pb2_grpc.PoolLinkServicer):
    def __init__(self, host: PoolHost) -> None:
        self._host = host
        self._streams: set[_Stream] = set()
        self._closing = False

    async def Attach(self, _: object, context: Context) -> None:
        """One node's stream, from AttachPool to its end."""
        first = await _first(context)
        try:
            if self._closing:
                raise Draining("the pool is stopping")
            desk = await self._host.attach(_applicant(first.attach))
        except BatonError as error:
            _limited.write(log.get("pool").warning, "attach refused", node=first.attach.node, reason=error.message)
            await context.write(pb.PoolAnswer(id=first.id, error=wire.error_to_pb(error)))
            return
        stream = _Stream(self._host, desk, context)
        self._streams.add(stream)
        try:
            await stream.run(first.id)
        except grpc.RpcError:  # the node is gone
            pass
        finally:
            self._streams.discard(stream)
            self._host.ended(desk)

    async def drain(self) -> None:
        """Answer what was asked, take no more, and end the streams."""
        self._closing = True
        for stream in list(self._streams):
            stream.stop()
        await asyncio.gather(*(stream.ended.wait() for stream in list(self._streams)))


class _Stream:
    def __init__(self, host: PoolHost, desk: Desk, context: Context) -> None:
        self.ended = asyncio.Event()
        self._host = host
        self._desk = desk
        self._context = context
        self._stop = asyncio.Event()
        self._answers: asyncio.Queue[pb.PoolAnswer] = asyncio.Queue(_UNREAD)
        self._slow: set[asyncio.Task[None]] = set()  # answers that take a while

    def stop(self) -> None:
        self._stop.set()

    async def run(self, first: int) -> None:
        """Until either end ends it. Raises grpc.RpcError."""
        host, desk = self._host, self._desk
        attached = pb.Attached(
            segment=host.segment, blocks=host.pool.memory.total, fence=desk.fence, incarnation=host.incarnation
        )
        self._say(first, attached=attached)
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read())
        stopped = asyncio.create_task(self._stop.wait())
        tasks: set[asyncio.Task[Any]] = {writer, reader, stopped}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not reader.done():
                flushed = asyncio.create_task(self._flush())
                tasks.add(flushed)
                await asyncio.wait({flushed, writer}, timeout=_LAST_WORDS, return_when=asyncio.FIRST_COMPLETED)
            for task in (writer, reader):
                if task.done():
                    task.result()
        finally:
            tasks |= self._slow
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
                self._answer(question)
            except BatonError as error:
                self._say(question.id, error=wire.error_to_pb(error))

    async def _write(self) -> None:
        while True:
            answer = await self._answers.get()
            await self._context.write(answer)
            self._answers.task_done()

    async def _flush(self) -> None:
        if self._slow:
            await asyncio.wait(self._slow)
        await self._answers.join()

    def _say(self, question: int, **answer: Any) -> None:
        try:
            self._answers.put_nowait(pb.PoolAnswer(id=question, **answer))
        except asyncio.QueueFull:
            log.get("pool").error("a node reads too slowly and is given up", holder=self._desk.holder)
            self._stop.set()

    def _answer(self, question: pb.PoolQuestion) -> None:
        host, desk = self._host, self._desk
        match question.WhichOneof("question"):
            case "find":
                self._find(question.id, question.find)
            case "release":
                host.release(desk, question.release.pins)
            case "reserve":
                granted, room_made = host.reserve(desk, self._chain(question.reserve.chain), question.reserve.first)
                places = pb.Granted(publication=granted.publication or 0, first=granted.first, blocks=granted.blocks)
                if room_made is None:
                    self._say(question.id, granted=places)
                else:
                    self._take_time(self._grant(question.id, places, room_made))
            case "seal":
                seal = question.seal
                finding = partial(host.seal, desk, seal.publication, seal.checksums)
                self._take_time(self._found(question.id, finding))
            case "withdraw":
                host.withdraw(desk, question.withdraw.publication)
            case other:
                raise InvalidRequest(f"question {other!r} cannot be asked here")

    def _find(self, number: int, find: pb.FindPrefix) -> None:
        elsewhere = wire.elsewhere_from_pb(find.elsewhere) if find.HasField("elsewhere") else None
        token_seconds = find.token_seconds if 0 < find.token_seconds < math.inf else None
        asked = Question(self._chain(find.chain), find.max_tokens, find.partial, token_seconds, elsewhere)
        found, arrival = self._host.find(self._desk, asked)
        answer = _found_pb(found)
        if arrival is not None and len(self._slow) < _SLOW:
            answer.loading, answer.patience = arrival.blocks, arrival.patience
            finding = partial(self._host.find_more, self._desk, asked, arrival, len(found.blocks))
            self._take_time(self._found(number, finding))
        self._say(number, found=answer)

    def _take_time(self, answering: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answering)
        self._slow.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._slow.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # else the node would wait for ever
            log.get("pool").error("an answer failed", kind=type(error).__name__, places=log.places(error))
            self._stop.set()

    async def _grant(self, question: int, places: pb.Granted, room_made: Awaitable[None]) -> None:
        await room_made
        self._say(question, granted=places)

    async def _found(self, question: int, finding: Callable[[], Awaitable[Found]]) -> None:
        try:
            found = await finding()
        except BatonError as error:
            self._say(question, error=wire.error_to_pb(error))
        else:
            self._say(question, found=_found_pb(found))

    def _chain(self, chain: pb.Chain) -> Chain:
        """Raises InvalidRequest."""
        return Chain(BlockHash(chain.root), chain.names, chain.tokens, self._host.layout.block_size)


async def _first(context: Context) -> pb.PoolQuestion:
    try:
        async with asyncio.timeout(_FIRST_TIMEOUT):
            message = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no question within {_FIRST_TIMEOUT:g} s")
    if message is grpc.aio.EOF or not message.HasField("attach"):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first question must be AttachPool")
    return message  # type: ignore[no-any-return]


def _applicant(attach: pb.AttachPool) -> Applicant:
    return Applicant(
        protocol_version=attach.protocol_version,
        node=attach.node[:128],
        process=attach.incarnation,
        host_id=attach.host_id,
        digest=attach.model_digest,
        layout=wire.layout_from_pb(attach.layout),
    )


def _found_pb(found: Found) -> pb.Found:
    block, tokens = found.partial or (0, 0)
    return pb.Found(
        pin=found.pin or 0, blocks=found.blocks, partial_block=block, partial_tokens=tokens, remote=found.remote
    )
