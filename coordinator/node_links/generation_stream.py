"""One request's events on their way to one reader."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.errors import BatonError
from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason, RequestId
from coordinator.generation import FinishedEvent, GenerationEvent, PromptLogprobsEvent, TokensEvent

MAX_UNREAD_TOKENS = 1024  # tokens that a slow reader may leave behind


class GenerationStream:
    """A `Generation`. Written by the dispatcher, read by one task, both on the event loop."""

    def __init__(
        self,
        request: RequestId,
        cancel: Callable[[RequestId], None],
        stop: Callable[[RequestId], None],
    ) -> None:
        self._id = request
        self._cancel = cancel
        self._stop = stop
        self._events: deque[GenerationEvent] = deque()
        self._unread_tokens = 0
        self._error: BatonError | None = None
        self._timeline = Timeline()
        self._is_ended = False
        self._is_admitted = False
        self._wake: asyncio.Event = asyncio.Event()

    @property
    def id(self) -> RequestId:
        return self._id

    def cancel(self) -> None:
        if not self._is_ended:
            self._cancel(self._id)

    def stop(self) -> None:
        """An error that lies behind what the reader wanted is none to it."""
        if not self._is_ended:
            self._stop(self._id)
        elif self._error is not None:
            self._error = None
            self._events.append(FinishedEvent(FinishReason.STOP, 0, self._timeline))

    def mark_admitted(self) -> None:
        self._is_admitted = True
        self._wake.set()

    def push_prompt_logprobs(self, scores: PromptLogprobsEvent) -> None:
        """Comes once, so it does not count as unread."""
        self._events.append(scores)
        self._wake.set()

    def push_tokens(self, delta: TokensEvent) -> bool:
        """False if the reader has fallen too far behind."""
        self._events.append(delta)
        self._unread_tokens += len(delta.token_ids)
        self._wake.set()
        return self._unread_tokens <= MAX_UNREAD_TOKENS

    def end_stream(self, result: FinishedEvent | BatonError, timeline: Timeline) -> None:
        self._timeline = timeline
        if isinstance(result, FinishedEvent):
            self._events.append(result)
        else:
            self._error = result
        self._is_ended = True
        self._wake.set()

    async def wait_until_admitted(self) -> None:
        """Until the request is accepted for good. Raises what ended it before."""
        while not self._is_admitted:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    async def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        try:
            while True:
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, TokensEvent):
                        self._unread_tokens -= len(event.token_ids)
                    yield event
                if self._is_ended:
                    break
                self._wake.clear()
                await self._wake.wait()
        finally:
            self.cancel()  # a reader that leaves early, or is cancelled, must not leave work behind
        if self._error is not None:
            raise self._error
