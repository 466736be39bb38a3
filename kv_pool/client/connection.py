"""A node's connection to its pool: one stream and the attachment that belongs to it."""

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
