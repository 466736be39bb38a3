"""A session and the attachment that it is about: what is asked here is about those blocks and no
others."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from baton.errors import BatonError, PeerUnreachable
from baton.kv.pool_types import PoolPin
from baton.pb.pool_pb2 import PoolAnswer, PoolQuestion
from kv_pool.client.attachment import PoolAttachment
from kv_pool.client.stream import PoolStream

T = TypeVar("T")


class PoolConnection:
    """All of it may be called from other threads than that of `loop`."""

    def __init__(
        self, session: PoolStream, attachment: PoolAttachment, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.stream = session
        self.attachment = attachment
        self._loop = loop

    def send_and_wait(self, question: PoolQuestion, conclude: Callable[[PoolAnswer], T]) -> T:
        """Called on another thread, which waits. What `conclude` makes of the answer; it is called
        on the loop, in the order of the pool's answers. Raises what the pool answers, or
        PeerGone."""
        result: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._send_question, question, conclude, result)
        except RuntimeError:
            raise PeerUnreachable("this node is ending") from None
        try:
            return result.result()
        finally:
            # else an error, its traceback and this frame keep each other, and the mapping with them
            del result

    def call_on_loop(self, call: Callable[[], None]) -> None:
        """On the loop. One that has ended has nobody left to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def send_oneway(self, question: PoolQuestion) -> None:
        """From any thread."""
        self.call_on_loop(lambda: self.stream.send_oneway(question))

    def release_pin(self, pin: PoolPin) -> None:
        """From any thread. Raises ValueError for a pin that is not held."""
        if self.attachment.release_pin(pin):
            self.send_oneway(PoolQuestion(release={"pins": [pin.pin_number]}))

    def _send_question(
        self, question: PoolQuestion, conclude: Callable[[PoolAnswer], T], result: "Future[T]"
    ) -> None:
        def done(answer: "asyncio.Future[PoolAnswer]") -> None:
            error = answer.exception()
            if isinstance(error, BatonError):
                result.set_exception(error)
                return
            try:
                result.set_result(conclude(answer.result()))
            except Exception as failure:  # else the other thread would wait for ever
                result.set_exception(failure)
                raise

        self.stream.send_question(question).add_done_callback(done)
