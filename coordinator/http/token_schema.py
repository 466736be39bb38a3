"""The wire formats of POST /tokenize and POST /detokenize, as vLLM has them."""

from typing import ClassVar

import msgspec

from baton.errors import InvalidRequest
from coordinator.ask import Prompt
from coordinator.chat_template import Conversation
from coordinator.http.chat_schema import Message, TemplateArguments, conversation
from coordinator.http.decoding import Body
from coordinator.http.unserved_fields import DETOKENIZE, TOKENIZE, NoOps


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A text, or a conversation as the model will see it."""

    no_ops: ClassVar[NoOps] = TOKENIZE

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None

    @property
    def wording(self) -> Prompt | Conversation:
        """Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give prompt or messages, one of them", param="prompt")
        if self.prompt is not None:
            if self.chat_template_kwargs:
                raise InvalidRequest(
                    "chat_template_kwargs is given, but prompt is no conversation", param="chat_template_kwargs"
                )
            return self.prompt
        return conversation(self.messages, self.add_generation_prompt, self.chat_template_kwargs)


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    no_ops: ClassVar[NoOps] = DETOKENIZE

    tokens: list[int] | None = None
    model: str | None = None


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    prompt: str
