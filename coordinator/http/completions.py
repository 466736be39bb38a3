"""POST /v1/completions: one answer, whole or as server-sent events."""

from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from coordinator.ask import Ask
from coordinator.defects import internal
from coordinator.generation import Delta, Done, Event, PromptScores
from coordinator.http import errors
from coordinator.http.boundary import REQUEST_ID
from coordinator.http.connection import stopped_by_disconnect
from coordinator.http.schema import Choice, Completion, CompletionRequest, PromptTokensDetails, Usage
from coordinator.intake import Intake, Running

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class CompletionResponse(Response):
    """Runs the request while it is being answered, so that one place holds it from submission to its end.

    An error before the first byte is raised, for the application to answer with its status; later ones become an
    error event, after which the connection closes without `[DONE]`.
    """

    def __init__(self, intake: Intake, wire: CompletionRequest, ask: Ask) -> None:
        self.background = None
        self._intake = intake
        self._wire = wire
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with stopped_by_disconnect(receive):
            running = await self._intake.start(self._ask)
            scope["state"][REQUEST_ID] = running.id
            try:
                events = aiter(running.generation)
                if self._wire.stream:
                    await self._stream(running, events, send, scope["state"].get("hang_up"))
                else:
                    await self._whole(running, events, send)
            finally:
                running.generation.cancel()

    async def _whole(self, running: Running, events: AsyncIterator[Event], send: Send) -> None:
        pieces: list[str] = []
        tokens: list[int] = []
        async for event in events:
            if isinstance(event, Delta):
                pieces.append(running.text_of(event.tokens))
                tokens.extend(event.tokens)
            elif isinstance(event, Done):
                pieces.append(running.detokenizer.flush())
                choice = self._choice("".join(pieces), tokens, event)
                body = _encode(_completion(running, [choice], _usage(running, event)))
                await _start(send, [(b"content-type", b"application/json"), _length(body)])
                await send({"type": "http.response.body", "body": body})
                return
        raise AssertionError("a generation ended without Done or an error")

    async def _stream(
        self, running: Running, events: AsyncIterator[Event], send: Send, hang_up: Callable[[], None] | None
    ) -> None:
        first = await anext(events)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await _start(send, headers)
        try:
            await _event(send, self._chunks(running, first))
            async for event in events:
                await _event(send, self._chunks(running, event))
        except Exception as error:
            told = error if isinstance(error, BatonError) else internal(error)
            await _event(send, _data(errors.body_of(told)))
            await _end(send)
            if hang_up:
                hang_up()
            return
        await _end(send)

    def _chunks(self, running: Running, event: Event) -> bytes:
        """The events of one step; those of the last step end the stream."""
        if isinstance(event, Delta):
            return self._chunk(running, running.text_of(event.tokens), event.tokens)
        if isinstance(event, PromptScores):
            return b""
        rest = running.detokenizer.flush()
        chunks = [self._chunk(running, rest, ())] if rest else []
        chunks.append(self._chunk(running, "", (), event))
        if self._wire.include_usage:
            chunks.append(_data(_encode(_completion(running, [], _usage(running, event)))))
        return b"".join([*chunks, _DONE])

    def _chunk(self, running: Running, text: str, tokens: tuple[int, ...], end: Done | None = None) -> bytes:
        usage = None if self._wire.include_usage else msgspec.UNSET
        return _data(_encode(_completion(running, [self._choice(text, list(tokens), end)], usage)))

    def _choice(self, text: str, tokens: list[int], end: Done | None) -> Choice:
        return Choice(
            index=0,
            text=text,
            logprobs=None,
            finish_reason=end.reason.value if end else None,
            token_ids=tokens if self._wire.return_token_ids else msgspec.UNSET,
        )


def _completion(running: Running, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> Completion:
    return Completion(
        id=f"cmpl-{running.id}",
        object="text_completion",
        created=running.created,
        model=running.model,
        choices=choices,
        usage=usage,
    )


def _usage(running: Running, end: Done) -> Usage:
    return Usage(
        prompt_tokens=running.prompt_tokens,
        completion_tokens=running.completion_tokens,
        total_tokens=running.prompt_tokens + running.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(end.cached_tokens),
    )


def _data(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, payload: bytes) -> None:
    await send({"type": "http.response.body", "body": payload, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
