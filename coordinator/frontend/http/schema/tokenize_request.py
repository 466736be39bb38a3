"""The wire formats of POST /tokenize and POST /detokenize, as vLLM has them."""

from typing import ClassVar

import msgspec

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.body_decoder import RequestBody
from coordinator.frontend.http.schema.chat_messages import (
    ChatMessageParam,
    TemplateArguments,
    to_chat_prompt,
)
from coordinator.frontend.http.schema.tools import ToolChoiceParam, ToolParam, parse_tool_use
from coordinator.frontend.http.schema.unsupported_fields import (
    DETOKENIZE_NO_OPS,
    TOKENIZE_NO_OPS,
    NoOpValues,
)
from coordinator.frontend.request import Prompt
from coordinator.text.chat_template import ChatPrompt


class TokenizeRequest(RequestBody, frozen=True, kw_only=True):
    """A text, or a conversation as the model will see it."""

    no_ops: ClassVar[NoOpValues] = TOKENIZE_NO_OPS

    prompt: str | None = None
    messages: list[ChatMessageParam] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @property
    def tokenizer_input(self) -> Prompt | ChatPrompt:
        """Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give prompt or messages, one of them", param="prompt")
        if self.prompt is not None:
            if self.chat_template_kwargs:
                raise InvalidRequest(
                    "chat_template_kwargs is given, but prompt is not a conversation",
                    param="chat_template_kwargs",
                )
            return self.prompt
        tool_use = parse_tool_use(self.tools, self.tool_choice, None)
        return to_chat_prompt(
            self.messages,
            self.add_generation_prompt,
            self.chat_template_kwargs,
            tools=tool_use.tools if tool_use else (),
            continue_final_message=self.continue_final_message,
        )


class DetokenizeRequest(RequestBody, frozen=True, kw_only=True):
    no_ops: ClassVar[NoOpValues] = DETOKENIZE_NO_OPS

    tokens: list[int] | None = None
    model: str | None = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
