"""Prompts and sampling parameters as bodies of HTTP requests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from baton.errors import BatonError, InvalidRequest
from offline.answers import parse_chat, parse_completion
from offline.outputs import RequestOutput
from offline.sampling_params import SamplingParams

# A text, token ids, or a dictionary with either, as vLLM has them.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Conversation = Sequence[Message]

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt as an HTTP request."""

    path: str
    body: dict[str, Any]
    prompt_text: str | None = None
    params: SamplingParams | None = None

    def parse_answer(self, answer: Mapping[str, Any]) -> RequestOutput:
        """Convert the body of an answer with status 200."""
        if self.path == CHAT_COMPLETIONS:
            return parse_chat(answer)
        return parse_completion(answer, self.prompt_text, self.params or SamplingParams())

    def make_failed_output(self, request_id: str, error: BatonError) -> RequestOutput:
        return RequestOutput(request_id, self.prompt_text, [], None, [], True, None, error)

    def encode_body(self) -> bytes:
        """Raises InvalidRequest for a value that JSON does not have."""
        try:
            text = json.dumps(self.body, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None
        return text.encode(errors="surrogatepass")


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list. Raises InvalidRequest."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}: it must be a text, token ids, or a list of"
            " either",
            param="prompts",
        )
    return list(prompts)  # type: ignore[arg-type]


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return one or several conversations as a list. Raises InvalidRequest."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}: it must be a list of messages, or a list of"
            " such lists",
            param="messages",
        )
    if messages and all(isinstance(each, Mapping) for each in messages):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def build_completion(index: int, prompt: Prompt, params: SamplingParams | None) -> PromptRequest:
    """Build the request of one prompt. Raises InvalidRequest."""
    content: object = prompt
    if isinstance(prompt, Mapping):
        content = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if not isinstance(content, str) and not _are_token_ids(content):
        raise InvalidRequest(
            f"prompts[{index}] is {_describe(prompt)}: it must be a text, a list of token ids, or a"
            " dictionary with prompt or prompt_token_ids",
            param="prompts",
        )
    body: dict[str, Any] = {
        "prompt": content if isinstance(content, str) else list(content),
        "return_token_ids": True,
        **(params.to_body() if params is not None else {}),
    }
    text = content if isinstance(content, str) else None
    if params is not None:
        if params.logprobs is not None:
            body["logprobs"] = params.logprobs
        body |= params.extra_body
    return PromptRequest(COMPLETIONS, body, text, params)


def build_chat(
    index: int,
    messages: Conversation,
    params: SamplingParams | None,
    template_fields: Mapping[str, Any],
) -> PromptRequest:
    """Build the request of one conversation. Raises InvalidRequest."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages[{index}] is {_describe(messages)}: it must be a list of messages",
            param="messages",
        )
    body: dict[str, Any] = {
        "messages": list(messages),
        "return_token_ids": True,
        **template_fields,
        **(params.to_body() if params is not None else {}),
    }
    if params is not None:
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
        body |= params.extra_body
    return PromptRequest(CHAT_COMPLETIONS, body, None, params)


def _are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(type(each) is int for each in value)
    )


def _describe(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
