"""One request's events on their way to one reader."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.errors import BatonError
from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason, RequestId
from coordinator.generation import Delta, Done, Event, PromptScores

MAX_UNREAD = 1024  # tokens that a slow reader may leave behind


class Stream:
    """A `Generation`. Written by the dispatcher, read by one task, both on the event loop."""

    def __init__(
        self, request: RequestId, cancel: Callable[[RequestId], None], stop: Callable[[RequestId], None]
    ) -> None:
        self._id = request
        self._cancel = cancel
        self._stop = stop
        self._events: deque[Event] = deque()
        self._unread = 0
        self._error: BatonError | None = None
        self._timeline = Timeline()
        self._ended = False
        self._admitted = False
        self._wake: asyncio.Event = asyncio.Event()

    @property
    def id(self) -> RequestId:
        return self._id

    def cancel(self) -> None:
        if not self._ended:
            self._cancel(self._id)

    def stop(self) -> None:
        """An error that lies behind what the reader wanted is none to it."""
        if not self._ended:
            self._stop(self._id)
        elif self._error is not None:
            self._error = None
            self._events.append(Done(FinishReason.STOP, 0, self._timeline))

    def admit(self) -> None:
        self._admitted = True
        self._wake.set()

    def push_prompt(self, scores: PromptScores) -> None:
        """Comes once, so it does not count as unread."""
        self._events.append(scores)
        self._wake.set()

    def push(self, delta: Delta) -> bool:
        """False if the reader has fallen too far behind."""
        self._events.append(delta)
        self._unread += len(delta.tokens)
        self._wake.set()
        return self._unread <= MAX_UNREAD

    def end(self, result: Done | BatonError, timeline: Timeline) -> None:
        self._timeline = timeline
        if isinstance(result, Done):
            self._events.append(result)
        else:
            self._error = result
        self._ended = True
        self._wake.set()

    async def admitted(self) -> None:
        """Until the request is accepted for good. Raises what ended it before."""
        while not self._admitted:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while True:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, Delta):
                        self._unread -= len(event.tokens)
                    yield event
                if self._ended:
                    break
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.cancel()  # a reader that leaves early, or is cancelled, must not leave work behind
        if self._error is not None:
            raise self._error
