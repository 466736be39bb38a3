"""The wire format of POST /v1/chat/completions."""

from typing import Any, ClassVar

import msgspec

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.body_decoder import RequestBody, truncate_text
from coordinator.frontend.http.schema.common_fields import CommonRequestBody
from coordinator.frontend.http.schema.unsupported_fields import (
    CHAT_NO_OPS,
    MESSAGE_NO_OPS,
    NoOpValues,
)
from coordinator.frontend.request import GenerationRequest
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
    tool_calls: Any = None
    annotations: Any = None
    tools: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    phase: Any = None
    prefix: Any = None


class ChatRequest(CommonRequestBody, frozen=True, kw_only=True):
    """The body. Unsupported fields are accepted with their no-op values."""

    no_ops: ClassVar[NoOpValues] = CHAT_NO_OPS

    messages: list[ChatMessageParam] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    def to_generation_request(
        self, timeout: float | None, client_id: str | None
    ) -> GenerationRequest:
        """Raises InvalidRequest."""
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest(
                f"tools is a list of {len(self.tools)}: not available, it must be null or [], or "
                "tool_choice none",
                param="tools",
            )
        common = self.common_request_fields()
        param_names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    f"max_tokens is {self.max_tokens} and max_completion_tokens "
                    f"{self.max_completion_tokens}: "
                    "they mean the same, send one",
                    param="max_tokens",
                )
            common["max_tokens"] = self.max_completion_tokens
            param_names["max_tokens"] = "max_completion_tokens"
        return GenerationRequest(
            prompts=to_chat_prompt(
                self.messages, self.add_generation_prompt, self.chat_template_kwargs
            ),
            logprobs=self._top_logprobs(),
            timeout_seconds=timeout,
            client_request_id=self.get_client_request_id(client_id),
            param_names=param_names,
            **common,
        )

    def _top_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest(
                    "top_logprobs is given, but logprobs is not true", param="top_logprobs"
                )
            return None
        return self.top_logprobs or 0


def to_chat_prompt(
    messages: list[ChatMessageParam] | None,
    add_generation_prompt: bool | None,
    arguments: TemplateArguments | None,
) -> ChatPrompt:
    """Raises InvalidRequest."""
    if messages is None:
        raise InvalidRequest("messages is missing: it must be a list of messages", param="messages")
    shown = [
        _to_template_message(f"messages[{place}]", message)
        for place, message in enumerate(messages)
    ]
    return ChatPrompt(shown, add_generation_prompt is not False, arguments or {})


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
    return shown


def _message_text(where: str, message: ChatMessageParam) -> str:
    if message.content is None:
        if message.role == "assistant":  # clients send back empty responses so
            return ""
        raise InvalidRequest(f"{where}.content is missing: it must be text", param="messages")
    if isinstance(message.content, str):
        return message.content
    for place, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            given = f"{where}.content[{place}]"
            raise InvalidRequest(
                f"{given} has the type {truncate_text(part.type)!r}: only "
                '{"type": "text", "text": ...} is served',
                param="messages",
            )
    return "\n".join(part.text or "" for part in message.content)
