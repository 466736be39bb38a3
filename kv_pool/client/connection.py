"""A node's connection to its pool: one stream, and the attachment that belongs to it.

The stream has the node's questions and the pool's answers, and belongs to one event loop. The
attachment is the mapped segment and a locked byte of its fence file. The node holds the lock as
long as anything in it reads or writes the segment. When the stream to the pool ends, the attachment
is detached and takes no new users. The last of its users unlocks the byte and unmaps the segment;
only then may the pool reuse the blocks that were pinned.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc

from baton.cluster_link.pb_conversion import error_from_pb, layout_to_pb
from baton.errors import BatonError, PeerUnreachable
from baton.kv.pool_types import PoolHit, PoolPin
from baton.pb import pool_pb2_grpc
from baton.pb.pool_pb2 import Attached, AttachPool, Found, PoolAnswer, PoolQuestion
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.fence import WriterFences
from baton.types import BlockIndex
from kv_pool.common.block_rows import BlockRows
from kv_pool.common.protocol import (
    ATTACH_TIMEOUT_SECONDS,
    POOL_PROTOCOL_VERSION,
    PoolClientConfig,
)

POOL_MISS = PoolHit(None, ())
_MAX_UNSENT = 256  # questions; with so many queued, new questions fail
_MAX_UNANSWERED = 4096  # questions; likewise
T = TypeVar("T")


class SegmentMappings:
    """The segments of pools that are mapped in the node's address space.

    Attachments to one segment share its mapping, which is removed with the last of them.
    """

    def __init__(self, space: BlockAddressSpace, folder: Path, block_bytes: int) -> None:
        self.folder = folder
        self._space = space
        self._block_bytes = block_bytes
        self._mapped: WeakValueDictionary[str, BlockRows] = WeakValueDictionary()

    def map_segment(self, segment: str) -> tuple[BlockRows, int]:
        """Map a segment, which may take a while; returns its rows and its first global block index.

        Raises PeerUnreachable, LayoutMismatch or ConfigError.
        """
        rows = self._mapped.get(segment)
        if rows is None:
            rows = self._mapped[segment] = BlockRows(
                self._space.attach_segment(segment), self._block_bytes
            )
        return rows, self._space.address_map.get_span(segment).start


class PoolAttachment:
    """One attachment of this node. Thread-safe."""

    def __init__(self, number: int, attached: Attached, mappings: SegmentMappings) -> None:
        """Lock the fence byte, then map the segment, which may take a while.

        Raises PeerUnreachable, LayoutMismatch or ConfigError.
        """
        self.number = number  # counts the attachments of this node
        self.rows: BlockRows | None  # None when the segment is unmapped
        self._fences = WriterFences(mappings.folder, attached.segment)
        try:
            if not self._fences.try_lock_byte(attached.fence):
                raise PeerUnreachable(
                    f"the pool has taken back byte {attached.fence} of segment "
                    f"{attached.segment}: attaching took too long"
                )
            self.rows, self._first_global_block = mappings.map_segment(attached.segment)
        except BaseException:
            # Otherwise the byte would stay locked, and the pool wait for it, until this node ends.
            self._fences.close()
            raise
        self._lock = threading.Lock()
        self._pins: set[int] = set()
        self._num_copying = 0
        self._is_detached = False

    @property
    def is_detached(self) -> bool:
        return self._is_detached

    @property
    def is_unmapped(self) -> bool:
        """Whether the attachment is detached and has no users: its fence byte is unlocked."""
        return self.rows is None

    def register_hit(self, found: Found) -> PoolHit:
        """Convert a match of the pool and hold its pin; a miss if the attachment is detached."""
        if not found.pin:
            return POOL_MISS
        with self._lock:
            if self._is_detached:
                return POOL_MISS
            self._pins.add(found.pin)
        blocks = tuple(BlockIndex(self._first_global_block + block) for block in found.blocks)
        partial = (BlockIndex(self._first_global_block + found.partial_block), found.partial_tokens)
        return PoolHit(
            PoolPin(self.number, found.pin),
            blocks,
            partial if found.partial_tokens else None,
            found.remote,
        )

    def release_pin(self, pin: PoolPin) -> bool:
        """Release a pin; returns whether the pool has to be notified.

        Raises ValueError for a pin that is not held.
        """
        with self._lock:
            if pin.pin_number not in self._pins:
                raise ValueError(f"{pin} is released and not held")
            self._pins.remove(pin.pin_number)
            self._unmap_if_unused()
            return not self._is_detached

    def begin_copying(self) -> BlockRows | None:
        """Return the segment's rows, to write to until `end_copying`; None if detached."""
        with self._lock:
            if self._is_detached:
                return None
            self._num_copying += 1
            return self.rows

    def end_copying(self) -> None:
        with self._lock:
            self._num_copying -= 1
            self._unmap_if_unused()

    def detach(self) -> bool:
        """End the attachment; returns whether it had no users, so that its byte is unlocked."""
        with self._lock:
            self._is_detached = True
            self._unmap_if_unused()
            return self.is_unmapped

    def _unmap_if_unused(self) -> None:
        if self._is_detached and not self._pins and not self._num_copying and self.rows is not None:
            self._fences.close()
            self.rows = None


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


class PoolConnection:
    """One connection. Thread-safe; `loop` is the event loop that the stream belongs to."""

    def __init__(
        self, stream: PoolStream, attachment: PoolAttachment, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.stream = stream
        self.attachment = attachment
        self._loop = loop

    def send_and_wait(self, question: PoolQuestion, on_answer: Callable[[PoolAnswer], T]) -> T:
        """Send a question and block until it is answered; not to be called on the event loop.

        Returns what `on_answer` returns; it runs on the loop, in the order of the pool's answers.
        Raises the error that the pool answers, or PeerUnreachable.
        """
        result: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._send_question, question, on_answer, result)
        except RuntimeError:
            raise PeerUnreachable("this node is stopping") from None
        try:
            return result.result()
        finally:
            # Breaks the reference cycle of an error, its traceback and this frame, which would
            # keep the segment mapped.
            del result

    def call_on_loop(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the loop; dropped if the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def send_oneway(self, question: PoolQuestion) -> None:
        """Send a question that has no answer."""
        self.call_on_loop(lambda: self.stream.send_oneway(question))

    def release_pin(self, pin: PoolPin) -> None:
        """Release a pin. Raises ValueError for a pin that is not held."""
        if self.attachment.release_pin(pin):
            self.send_oneway(PoolQuestion(release={"pins": [pin.pin_number]}))

    def _send_question(
        self, question: PoolQuestion, on_answer: Callable[[PoolAnswer], T], result: "Future[T]"
    ) -> None:
        def on_done(answer: "asyncio.Future[PoolAnswer]") -> None:
            error = answer.exception()
            if isinstance(error, BatonError):
                result.set_exception(error)
                return
            try:
                result.set_result(on_answer(answer.result()))
            except Exception as failure:  # otherwise the other thread would wait for ever
                result.set_exception(failure)
                raise

        self.stream.send_question(question).add_done_callback(on_done)
