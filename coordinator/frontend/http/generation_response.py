"""The response of a generation: one body, or server-sent events."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from coordinator.frontend.http.errors import encode_error_body
from coordinator.frontend.http.request_handling import REQUEST_ID_KEY, cancel_on_disconnect
from coordinator.frontend.internal_errors import to_internal_error
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.frontend.request import GenerationRequest
from coordinator.frontend.request_intake import RequestIntake

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class StreamFormatter(Protocol):
    """Formats the output of one request for its route."""

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        """Return the server-sent events for a chunk."""
        ...

    def format_stream_end(self) -> bytes:
        """Return the last events of a stream without an error."""
        ...

    def format_error(self, error: BatonError, body: bytes) -> bytes:
        """Return the last event of a stream that ends with an error; `body` is OpenAI's object."""
        ...

    def add_chunk(self, chunk: OutputChunk) -> None:
        """Add a chunk to the body of a response that is not streamed."""
        ...

    def format_body(self) -> bytes: ...


class GenerationResponse(Response):
    """Runs the request while it is answered, so that one place owns it from submission to its end.

    An error before the first byte is raised, for the application to answer with its status; later
    ones become an error event, after which the connection closes without `[DONE]`.
    """

    def __init__(
        self,
        intake: RequestIntake,
        request: GenerationRequest,
        make_formatter: Callable[[ResponseStream], StreamFormatter],
        *,
        stream: bool,
    ) -> None:
        self.background = None
        self._intake = intake
        self._request = request
        self._make_formatter = make_formatter
        self._is_streaming = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            stream = await self._intake.start_request(self._request)
            scope["state"][REQUEST_ID_KEY] = stream.id
            try:
                chunks = stream.output_chunks()
                first = await anext(chunks)  # before it, there is nothing to format
                formatter = self._make_formatter(stream)
                if self._is_streaming:
                    hang_up = scope["state"].get("hang_up")
                    await _send_stream(first, chunks, formatter, send, hang_up)
                else:
                    await _send_body(first, chunks, formatter, send)
            finally:
                stream.cancel()


async def _send_body(
    first: OutputChunk,
    chunks: AsyncIterator[OutputChunk],
    formatter: StreamFormatter,
    send: Send,
) -> None:
    formatter.add_chunk(first)
    async for chunk in chunks:
        formatter.add_chunk(chunk)
    body = formatter.format_body()
    length = str(len(body)).encode()
    await _send_headers(send, [(b"content-type", b"application/json"), (b"content-length", length)])
    await send({"type": "http.response.body", "body": body})


async def _send_stream(
    first: OutputChunk,
    chunks: AsyncIterator[OutputChunk],
    formatter: StreamFormatter,
    send: Send,
    hang_up: Callable[[], None] | None,
) -> None:
    await _send_headers(send, _STREAM_HEADERS)
    try:
        await _send_event(send, formatter.format_chunk(first))
        async for chunk in chunks:
            await _send_event(send, formatter.format_chunk(chunk))
        await _send_event(send, formatter.format_stream_end())
    except Exception as error:
        client_error = error if isinstance(error, BatonError) else to_internal_error(error)
        await _send_event(
            send, formatter.format_error(client_error, encode_error_body(client_error))
        )
        await _end_body(send)
        if hang_up:
            hang_up()
        return
    await _end_body(send)


async def _send_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_event(send: Send, payload: bytes) -> None:
    if payload:  # a chunk may be held back
        await send({"type": "http.response.body", "body": payload, "more_body": True})


async def _end_body(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})
