"""A session and the attachment that it is about: what is asked here is about those blocks and no others."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from baton.errors import BatonError, PeerGone
from baton.pb.pool_pb2 import PoolAnswer, PoolQuestion
from baton.pool_terms import PoolPin
from kv_pool.attachment import Attachment
from kv_pool.session import Session

T = TypeVar("T")


class Line:
    """All of it may be called from other threads than that of `loop`."""

    def __init__(self, session: Session, attachment: Attachment, loop: asyncio.AbstractEventLoop) -> None:
        self.session = session
        self.attachment = attachment
        self._loop = loop

    def ask_and_wait(self, question: PoolQuestion, conclude: Callable[[PoolAnswer], T]) -> T:
        """Called on another thread, which waits. What `conclude` makes of the answer; it is called on the loop, in the
        order of the pool's answers. Raises what the pool answers, or PeerGone."""
        result: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(self._ask, question, conclude, result)
        except RuntimeError:
            raise PeerGone("this node is ending") from None
        try:
            return result.result()
        finally:
            del result  # else an error, its traceback and this frame keep each other, and the mapping with them

    def soon(self, call: Callable[[], None]) -> None:
        """On the loop. One that has ended has nobody left to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def tell(self, question: PoolQuestion) -> None:
        """From any thread."""
        self.soon(lambda: self.session.tell(question))

    def release(self, pin: PoolPin) -> None:
        """From any thread. Raises ValueError for a pin that is not held."""
        if self.attachment.release(pin):
            self.tell(PoolQuestion(release={"pins": [pin.number]}))

    def _ask(self, question: PoolQuestion, conclude: Callable[[PoolAnswer], T], result: "Future[T]") -> None:
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

        self.session.ask(question).add_done_callback(done)
