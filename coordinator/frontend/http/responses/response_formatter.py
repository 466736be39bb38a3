"""Formats responses of /v1/responses: one object, or OpenAI's typed events."""

from collections.abc import Iterable
from typing import Any

import msgspec

from baton.errors import BatonError
from baton.types import FinishReason
from coordinator.frontend.http.responses.parsed_choice import ParsedChoice
from coordinator.frontend.http.responses.response_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Event,
    ResponseItems,
)
from coordinator.frontend.http.responses.response_objects import (
    IncompleteDetails,
    ResponsesResponse,
    count_usage,
)
from coordinator.frontend.http.responses.sse import encode_json
from coordinator.frontend.http.schema.responses_request import ResponsesRequest
from coordinator.frontend.output import OutputChunk, ResponseStream
from coordinator.text.output_parsers.deltas import ContentDelta, OutputDelta, ReasoningDelta


class ResponseFormatter:
    """Formats one response, streamed or not."""

    def __init__(self, request: ResponsesRequest, stream: ResponseStream) -> None:
        self._response_stream = stream
        self._parsed = None if stream.parsing is None else ParsedChoice(stream, 0)
        self._items = ResponseItems(
            stream.id,
            self._parsed.make_call_id if self._parsed else str,
            is_streaming=bool(request.stream),
        )
        self._reasoning_tokens = 0
        self._sequence_number = 0
        self._response = _begin_response(request, stream)

    def format_chunk(self, chunk: OutputChunk) -> bytes:
        """Return the events of a chunk; the first events tell of the response."""
        events = [] if self._sequence_number else self._encode_start()
        events += map(self._encode_event, self._process_chunk(chunk))
        return b"".join(events)

    def format_stream_end(self) -> bytes:
        self._response.usage = count_usage(self._response_stream, self._reasoning_tokens)
        kind = f"response.{self._response.status}"
        return self._encode_event((kind, {"response": self._response}))

    def format_error(self, error: BatonError, body: bytes) -> bytes:
        return self._encode_event(
            ("error", {"code": error.code, "message": error.message, "param": error.param})
        )

    def add_chunk(self, chunk: OutputChunk) -> None:
        for _ in self._process_chunk(chunk):
            pass

    def format_body(self) -> bytes:
        self._response.usage = count_usage(self._response_stream, self._reasoning_tokens)
        return encode_json(self._response)

    def _process_chunk(self, chunk: OutputChunk) -> Iterable[Event]:
        """Add a chunk to the items and yield its events; the last chunk completes the response."""
        deltas: list[OutputDelta]
        if self._parsed is not None:
            deltas = self._parsed.parse_chunk(chunk)
        else:
            deltas = [ContentDelta(chunk.text)] if chunk.text else []
        if deltas and all(isinstance(delta, ReasoningDelta) for delta in deltas):
            self._reasoning_tokens += len(chunk.token_ids)
        for delta in deltas:
            yield from self._items.add_delta(delta)
        if chunk.finish_reason is not None:
            is_cut = chunk.finish_reason is FinishReason.LENGTH
            self._response.status = INCOMPLETE if is_cut else COMPLETED
            if is_cut:
                self._response.incomplete_details = IncompleteDetails("max_output_tokens")
            yield from self._items.close_item(self._response.status)
            self._response.output = list(self._items.items)

    def _encode_start(self) -> list[bytes]:
        return [
            self._encode_event((kind, {"response": self._response}))
            for kind in ("response.created", "response.in_progress")
        ]

    def _encode_event(self, event: Event) -> bytes:
        kind, members = event
        data = {"type": kind, "sequence_number": self._sequence_number, **members}
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(data))


def _begin_response(request: ResponsesRequest, stream: ResponseStream) -> ResponsesResponse:
    text: dict[str, Any] = msgspec.to_builtins(request.text) if request.text else {}
    if text.get("format") is None:
        text["format"] = {"type": "text"}
    choice = request.tool_choice
    return ResponsesResponse(
        id=f"resp_{stream.id}",
        created_at=stream.created_unix_seconds,
        model=stream.model,
        status=IN_PROGRESS,
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=request.temperature,
        text=text,
        tool_choice=("auto" if choice is None else choice),
        tools=list(request.tools or ()),
        top_p=request.top_p,
    )
