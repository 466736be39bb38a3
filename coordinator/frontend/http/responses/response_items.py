"""The items of one response, built from deltas, and the events that tell a client of them."""

from collections.abc import Callable, Iterator
from typing import Any

from coordinator.frontend.http.responses.response_objects import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStart,
)

Event = tuple[str, dict[str, Any]]  # its type, and its other members
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


class ResponseItems:
    """The items so far. At most the last one is open."""

    def __init__(
        self, response_id: str, make_call_id: Callable[[int], str], *, is_streaming: bool
    ) -> None:
        self.items: list[OutputItem] = []
        self._response_id = response_id
        self._make_call_id = make_call_id
        self._is_streaming = is_streaming
        self._open_kind: type[OutputItem] | None = None
        self._pieces: list[str] = []  # of the open item's text or arguments

    def add_delta(self, delta: OutputDelta) -> Iterator[Event]:
        """Add what the output has more; yield the events for it."""
        match delta:
            case ContentDelta(text):
                if self._open_kind is not OutputMessage:
                    yield from self._open_item(
                        OutputMessage(self._make_id("msg"), IN_PROGRESS, []), OutputText("")
                    )
                yield self._add_text(text, "response.output_text.delta", logprobs=[])
            case ReasoningDelta(text):
                if self._open_kind is not ReasoningItem:
                    yield from self._open_item(
                        ReasoningItem(self._make_id("rs"), IN_PROGRESS, []), ReasoningText("")
                    )
                yield self._add_text(text, "response.reasoning_text.delta")
            case ToolCallStart(index, name):
                yield from self._open_item(
                    FunctionCallItem(
                        self._make_id("fc"), IN_PROGRESS, self._make_call_id(index), name, ""
                    )
                )
            case ToolCallArguments(_, text):
                self._pieces.append(text)
                place = self._place()
                yield "response.function_call_arguments.delta", {**place, "delta": text}
            case ToolCallBroken(_, text):
                if self._is_streaming:
                    yield from self.close_item(INCOMPLETE)
                else:
                    self.items.pop()
                    self._open_kind = None
                    yield from self.add_delta(ContentDelta(text))

    def close_item(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        if self._open_kind is None:
            return
        item, text, place = self.items[-1], "".join(self._pieces), self._place()
        self._open_kind = None
        item.status = status
        match item:
            case OutputMessage():
                part = OutputText(text)
                item.content = [part]
                yield (
                    "response.output_text.done",
                    {**place, "content_index": 0, "text": text, "logprobs": []},
                )
                yield "response.content_part.done", {**place, "content_index": 0, "part": part}
            case ReasoningItem():
                reasoning = ReasoningText(text)
                item.content = [reasoning]
                yield (
                    "response.reasoning_text.done",
                    {**place, "content_index": 0, "text": text},
                )
                yield "response.content_part.done", {**place, "content_index": 0, "part": reasoning}
            case FunctionCallItem():
                item.arguments = text
                yield (
                    "response.function_call_arguments.done",
                    {**place, "name": item.name, "arguments": text},
                )
        output_index = place["output_index"]
        yield "response.output_item.done", {"output_index": output_index, "item": item}

    def _open_item(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[Event]:
        yield from self.close_item(COMPLETED)
        self.items.append(item)
        self._open_kind = type(item)
        self._pieces = []
        output_index = len(self.items) - 1
        yield "response.output_item.added", {"output_index": output_index, "item": item}
        if part is not None:
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}

    def _add_text(self, text: str, kind: str, **members: object) -> Event:
        self._pieces.append(text)
        return kind, {**self._place(), "content_index": 0, "delta": text, **members}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}

    def _make_id(self, prefix: str) -> str:
        return f"{prefix}_{self._response_id}_{len(self.items)}"
