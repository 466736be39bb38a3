"""The stream of one request's events, from the dispatcher to its reader."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from baton.errors import BatonError
from baton.types import FinishReason, RequestId
from coordinator.core.common.timeline import Timeline
from coordinator.generation import FinishedEvent, GenerationEvent, PromptLogprobsEvent, TokensEvent

MAX_UNREAD_TOKENS = 1024  # tokens that a slow reader may leave unread


class GenerationStream:
    """A `Generation`, written by the dispatcher and read by one task on the same event loop."""

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
        """See `Generation.stop`. Errors after the stop point are not reported to the reader."""
        if not self._is_ended:
            self._stop(self._id)
        elif self._error is not None:
            self._error = None
            self._events.append(FinishedEvent(FinishReason.STOP, 0, self._timeline))

    def mark_admitted(self) -> None:
        self._is_admitted = True
        self._wake.set()

    def push_prompt_logprobs(self, scores: PromptLogprobsEvent) -> None:
        """Add the logprobs of the prompt, which do not count as unread tokens."""
        self._events.append(scores)
        self._wake.set()

    def push_tokens(self, event: TokensEvent) -> bool:
        """Add tokens. Return False if the reader has fallen too far behind."""
        self._events.append(event)
        self._unread_tokens += len(event.token_ids)
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
        """Wait until the request is admitted. Raises the error that ended it before."""
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
            self.cancel()  # in case the reader has left early or was cancelled
        if self._error is not None:
            raise self._error
