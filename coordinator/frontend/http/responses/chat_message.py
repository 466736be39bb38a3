"""The message of a chat completion, whole and as the deltas of a stream."""

import msgspec

from coordinator.frontend.http.responses.parsed_choice import ParsedChoice, ParsedMessage
from coordinator.frontend.http.responses.sse import encode_json
from coordinator.frontend.output import OutputChunk
from coordinator.text.output_parsers.deltas import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

EMPTY_DELTA = b"{}"


class ChatFunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    """A call of a function; `arguments` is JSON as the model wrote it."""

    id: str
    function: ChatFunctionCall
    type: str = "function"


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """More of a call; the first delta of a call has its id, type and name."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What one event adds to a message."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = []
    reasoning_content: str = ""
    reasoning: str = ""


def build_message(parsed: ParsedMessage, *, includes_reasoning: bool) -> ChatMessage:
    """Return the message; its content is null if there are only calls or reasoning."""
    reasoning = parsed.reasoning if includes_reasoning and parsed.reasoning else msgspec.UNSET
    has_more = bool(parsed.calls or parsed.reasoning)
    return ChatMessage(
        "assistant",
        None if has_more and not parsed.content else parsed.content,
        tool_calls=[
            ChatToolCall(call.id, ChatFunctionCall(call.name, call.arguments))
            for call in parsed.calls
        ]
        or msgspec.UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
    )


def encode_deltas(choice: ParsedChoice, chunk: OutputChunk, *, includes_reasoning: bool) -> bytes:
    """Return what the chunk adds to the message, EMPTY_DELTA if nothing."""
    message = ChatDelta(tool_calls=[])
    calls: dict[int, ToolCallDelta] = {}
    for delta in choice.parse_chunk(chunk):
        match delta:
            case ContentDelta(text):
                message.content += text
            case ReasoningDelta(text) if includes_reasoning:
                message.reasoning += text
            case ToolCallStart(index, name):
                calls[index] = ToolCallDelta(
                    index, FunctionCallDelta("", name), choice.make_call_id(index), "function"
                )
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, ToolCallDelta(index, FunctionCallDelta("")))
                call.function.arguments += text
    message.reasoning_content = message.reasoning
    message.tool_calls = list(calls.values())
    return encode_json(message)
