"""The answer to a request for text, whole or as server-sent events, in whatever shape its route
has."""

from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from coordinator.frontend.http import errors
from coordinator.frontend.http.middleware import REQUEST_ID_KEY
from coordinator.frontend.http.request_body import cancel_on_disconnect
from coordinator.frontend.internal_errors import to_internal_error
from coordinator.frontend.output import OutputChunk
from coordinator.frontend.request import GenerationRequest
from coordinator.frontend.request_intake import RequestIntake
from coordinator.frontend.response_stream import ResponseStream

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class ResponseFormatter(Protocol):
    """How one answer is worded."""

    def format_chunk(self, piece: OutputChunk) -> bytes:
        """The payloads of a piece as server-sent events."""
        ...

    def format_stream_end(self) -> bytes:
        """What a stream ends with before [DONE]."""
        ...

    def add_chunk(self, piece: OutputChunk) -> None:
        """A piece of an answer that is told as a whole."""
        ...

    def format_body(self) -> bytes: ...


class GenerationResponse(Response):
    """Runs the request while it is being answered, so that one place holds it from submission to
    its end.

    An error before the first byte is raised, for the application to answer with its status; later
    ones become an error event, after which the connection closes without `[DONE]`.
    """

    def __init__(
        self,
        intake: RequestIntake,
        ask: GenerationRequest,
        shape: Callable[[ResponseStream], ResponseFormatter],
        *,
        stream: bool,
    ) -> None:
        self.background = None
        self._intake = intake
        self._request = ask
        self._make_formatter = shape
        self._is_streaming = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            answer = await self._intake.start_request(self._request)
            scope["state"][REQUEST_ID_KEY] = answer.id
            try:
                shape = self._make_formatter(answer)
                if self._is_streaming:
                    await _send_stream(answer, shape, send, scope["state"].get("hang_up"))
                else:
                    await _send_body(answer, shape, send)
            finally:
                answer.cancel()


async def _send_body(answer: ResponseStream, shape: ResponseFormatter, send: Send) -> None:
    async for piece in answer.output_chunks():
        shape.add_chunk(piece)
    body = shape.format_body()
    length = str(len(body)).encode()
    await _send_headers(send, [(b"content-type", b"application/json"), (b"content-length", length)])
    await send({"type": "http.response.body", "body": body})


async def _send_stream(
    answer: ResponseStream, shape: ResponseFormatter, send: Send, hang_up: Callable[[], None] | None
) -> None:
    pieces = answer.output_chunks()
    first = await anext(pieces)
    await _send_headers(send, _STREAM_HEADERS)
    try:
        await _send_event(send, shape.format_chunk(first))
        async for piece in pieces:
            await _send_event(send, shape.format_chunk(piece))
        await _send_event(send, shape.format_stream_end() + _DONE)
    except Exception as error:
        told = error if isinstance(error, BatonError) else to_internal_error(error)
        await _send_event(send, b"data: " + errors.encode_error_body(told) + b"\n\n")
        await _end_body(send)
        if hang_up:
            hang_up()
        return
    await _end_body(send)


async def _send_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_event(send: Send, payload: bytes) -> None:
    await send({"type": "http.response.body", "body": payload, "more_body": True})


async def _end_body(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
