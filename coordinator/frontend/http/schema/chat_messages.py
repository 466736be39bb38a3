"""The wire format of a conversation's messages, and its conversion for the chat template."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.body_decoder import RequestBody, truncate_text
from coordinator.frontend.http.schema.tools import (
    ToolCallParam,
    check_total_arguments,
    to_template_calls,
)
from coordinator.frontend.http.schema.unsupported_fields import MESSAGE_NO_OPS, NoOpValues
from coordinator.frontend.tool_use import JsonObject
from coordinator.text.chat_template import ChatPrompt

TemplateArguments = dict[str, str | int | float | bool | None]


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content. Only the type `text` is served."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessageParam(RequestBody, frozen=True, kw_only=True):
    """A message of a conversation."""

    no_ops: ClassVar[NoOpValues] = MESSAGE_NO_OPS

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[ToolCallParam] | None = None
    annotations: Any = None
    tools: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    phase: Any = None
    prefix: Any = None


def to_chat_prompt(
    messages: list[ChatMessageParam] | None,
    add_generation_prompt: bool | None,
    arguments: TemplateArguments | None,
    *,
    tools: Sequence[JsonObject] = (),
    continue_final_message: bool | None = None,
) -> ChatPrompt:
    """Raises InvalidRequest."""
    if messages is None:
        raise InvalidRequest("messages is missing: it must be a list of messages", param="messages")
    check_total_arguments(call for message in messages for call in message.tool_calls or ())
    shown = [
        _to_template_message(f"messages[{index}]", message)
        for index, message in enumerate(messages)
    ]
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true: the prompt ends in "
            "the last message, or opens a new one",
            param="continue_final_message",
        )
    return ChatPrompt(
        shown,
        add_generation_prompt is not False and not continue_final_message,
        arguments or {},
        tools,
        continue_final_message=bool(continue_final_message),
    )


def _to_template_message(where: str, message: ChatMessageParam) -> dict[str, object]:
    """Convert a message for the template, without fields that were not given."""
    for field, accepted in message.no_ops.items():
        if getattr(message, field) not in (None, *accepted):
            raise InvalidRequest(
                f"{where}.{field} is given: not available, leave it out", param="messages"
            )
    shown: dict[str, object] = {"role": message.role, "content": _message_text(where, message)}
    shown.update(
        (field, value)
        for field in ("name", "tool_call_id")
        if (value := getattr(message, field)) is not None
    )
    if message.tool_calls:
        _check_role(where, message, "tool_calls")
        shown["tool_calls"] = to_template_calls(where, message.tool_calls)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        _check_role(where, message, "reasoning")
        # Templates read either name.
        shown["reasoning_content"] = shown["reasoning"] = reasoning
    return shown


def _check_role(where: str, message: ChatMessageParam, field: str) -> None:
    if message.role != "assistant":
        raise InvalidRequest(
            f"{where}.{field} is given: only messages of the role assistant have it",
            param="messages",
        )


def _message_text(where: str, message: ChatMessageParam) -> str:
    if message.content is None:
        if message.role == "assistant":  # clients send back empty responses so
            return ""
        raise InvalidRequest(f"{where}.content is missing: it must be text", param="messages")
    if isinstance(message.content, str):
        return message.content
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            given = f"{where}.content[{index}]"
            raise InvalidRequest(
                f"{given} has the type {truncate_text(part.type)!r}: only "
                '{"type": "text", "text": ...} is served',
                param="messages",
            )
    return "\n".join(part.text or "" for part in message.content)
