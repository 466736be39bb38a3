"""The answer to a request for text, whole or as server-sent events, in whatever shape its route has."""

from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from coordinator.answer import Answer
from coordinator.ask import Ask
from coordinator.defects import internal
from coordinator.http import errors
from coordinator.http.boundary import REQUEST_ID
from coordinator.http.connection import stopped_by_disconnect
from coordinator.intake import Intake
from coordinator.telling import Piece

_DONE = b"data: [DONE]\n\n"
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Shape(Protocol):
    """How one answer is worded."""

    def chunk(self, piece: Piece) -> bytes:
        """The payloads of a piece as server-sent events."""
        ...

    def last(self) -> bytes:
        """What a stream ends with before [DONE]."""
        ...

    def add(self, piece: Piece) -> None:
        """A piece of an answer that is told as a whole."""
        ...

    def whole(self) -> bytes: ...


class AnswerResponse(Response):
    """Runs the request while it is being answered, so that one place holds it from submission to its end.

    An error before the first byte is raised, for the application to answer with its status; later ones become an
    error event, after which the connection closes without `[DONE]`.
    """

    def __init__(self, intake: Intake, ask: Ask, shape: Callable[[Answer], Shape], *, stream: bool) -> None:
        self.background = None
        self._intake = intake
        self._ask = ask
        self._shape = shape
        self._streamed = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with stopped_by_disconnect(receive):
            answer = await self._intake.start(self._ask)
            scope["state"][REQUEST_ID] = answer.id
            try:
                shape = self._shape(answer)
                if self._streamed:
                    await _stream(answer, shape, send, scope["state"].get("hang_up"))
                else:
                    await _whole(answer, shape, send)
            finally:
                answer.cancel()


async def _whole(answer: Answer, shape: Shape, send: Send) -> None:
    async for piece in answer.pieces():
        shape.add(piece)
    body = shape.whole()
    length = str(len(body)).encode()
    await _start(send, [(b"content-type", b"application/json"), (b"content-length", length)])
    await send({"type": "http.response.body", "body": body})


async def _stream(answer: Answer, shape: Shape, send: Send, hang_up: Callable[[], None] | None) -> None:
    pieces = answer.pieces()
    first = await anext(pieces)
    await _start(send, _STREAM)
    try:
        await _event(send, shape.chunk(first))
        async for piece in pieces:
            await _event(send, shape.chunk(piece))
        await _event(send, shape.last() + _DONE)
    except Exception as error:
        told = error if isinstance(error, BatonError) else internal(error)
        await _event(send, b"data: " + errors.body_of(told) + b"\n\n")
        await _end(send)
        if hang_up:
            hang_up()
        return
    await _end(send)


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, payload: bytes) -> None:
    await send({"type": "http.response.body", "body": payload, "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
