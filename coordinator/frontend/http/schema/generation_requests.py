"""The wire formats of POST /v1/completions and POST /v1/chat/completions, and what they share."""

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.body_decoder import RequestBody, truncate_text
from coordinator.frontend.http.schema.chat_messages import (
    ChatMessageParam,
    TemplateArguments,
    to_chat_prompt,
)
from coordinator.frontend.http.schema.structured_output_fields import (
    ResponseFormat,
    StructuredOutputs,
    read_structured_output,
)
from coordinator.frontend.http.schema.tools import (
    ToolChoiceParam,
    ToolParam,
    constrain_output,
    parse_tool_use,
)
from coordinator.frontend.http.schema.unsupported_fields import (
    CHAT_NO_OPS,
    COMPLETION_NO_OPS,
    NoOpValues,
)
from coordinator.frontend.request import (
    GenerationRequest,
    Prompt,
    PromptTruncation,
    check_client_request_id,
)

_TOKEN_ID = re.compile(r"\d{1,9}")

TOP_K_OFF = -1  # "no top-k" in vLLM and SGLang; 0 in Baton
TRUNCATE_TO_CONTEXT = -1  # as vLLM has it


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # no padding is ever added


class CommonRequestBody(RequestBody, frozen=True, kw_only=True):
    """The common fields. `user`, `session_id` and the like have no effect."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    first_choice: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    rid: str | None = None
    best_of: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def get_client_request_id(self, header: str | None) -> str | None:
        """Return the client's own request id, from the header or else the body.

        Raises InvalidRequest.
        """
        if header is not None:
            return header
        if self.request_id is not None:
            return check_client_request_id(self.request_id, "request_id")
        return check_client_request_id(self.rid, "rid")

    def common_request_fields(self) -> dict[str, Any]:
        """Return these fields as arguments of `GenerationRequest`. Raises InvalidRequest."""
        self._check_stream()
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, n):
            raise InvalidRequest(
                f"best_of is {self.best_of}: not available, it must be null or n ({n})",
                param="best_of",
            )
        structured_output, given_by = read_structured_output(
            self.response_format, self.structured_outputs
        )
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_k": 0 if self.top_k == TOP_K_OFF else self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _parse_logit_bias(self.logit_bias or {}),
            "prompt_logprobs": self.prompt_logprobs,
            "truncation": self._parse_truncation(),
            "n": n,
            "first_choice": self.first_choice or 0,
            "priority": self.priority or 0,
            "structured_output": structured_output,
            "param_names": {"structured_output": given_by},
        }

    def _check_stream(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is given, but stream is not true", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs}: not available with stream, leave one "
                "of them out",
                param="prompt_logprobs",
            )

    def _parse_truncation(self) -> PromptTruncation | None:
        kept = self.truncate_prompt_tokens
        if kept is None:
            return None
        if kept < 1 and kept != TRUNCATE_TO_CONTEXT:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {kept}: it must be at least 1, or "
                f"{TRUNCATE_TO_CONTEXT} for what the context has room for",
                param="truncate_prompt_tokens",
            )
        return PromptTruncation(
            None if kept == TRUNCATE_TO_CONTEXT else kept, self.truncation_side != "right"
        )


def _parse_logit_bias(logit_bias: dict[str, float]) -> list[tuple[int, float]]:
    """Parse the keys, which are token ids. Raises InvalidRequest."""
    biases: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not _TOKEN_ID.fullmatch(key) or not key.isascii():
            raise InvalidRequest(
                f"logit_bias has the key {truncate_text(key)!r}: keys are token ids",
                param="logit_bias",
            )
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias has token id {int(key)} twice", param="logit_bias")
        biases[int(key)] = bias
    return list(biases.items())


class CompletionRequest(CommonRequestBody, frozen=True, kw_only=True):
    """The body. Unsupported fields are accepted with their no-op values."""

    no_ops: ClassVar[NoOpValues] = COMPLETION_NO_OPS

    prompt: str | list[int | str | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def to_generation_request(
        self, timeout: float | None, client_id: str | None
    ) -> GenerationRequest:
        """Raises InvalidRequest."""
        return GenerationRequest(
            prompts=_parse_prompts(self.prompt),
            echo=bool(self.echo),
            logprobs=self.logprobs,
            timeout_seconds=timeout,
            client_request_id=self.get_client_request_id(client_id),
            **self.common_request_fields(),
        )


def _parse_prompts(prompt: str | list[int | str | list[int]] | None) -> list[Prompt] | None:
    """Parse a text, token ids, or a list of either. Raises InvalidRequest."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [_require_same_type(prompt, int)]
    return list(_require_same_type(prompt, type(prompt[0])))


def _require_same_type(prompt: list[Any], item_type: type) -> list[Any]:
    for index, item in enumerate(prompt):
        if type(item) is not item_type:
            raise InvalidRequest(
                f"prompt[{index}] and prompt[0] differ in type: a list has token ids, texts, or "
                "lists of token ids",
                param="prompt",
            )
    return prompt


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
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    continue_final_message: bool | None = None

    def to_generation_request(
        self, timeout: float | None, client_id: str | None
    ) -> GenerationRequest:
        """Raises InvalidRequest."""
        tool_use = parse_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        common = self.common_request_fields()
        param_names = {"prompt": "messages", "logprobs": "top_logprobs"} | common.pop("param_names")
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
        common["structured_output"] = constrain_output(
            tool_use, common["structured_output"], param_names["structured_output"]
        )
        if tool_use is not None and tool_use.is_forced:
            param_names["structured_output"] = "tools"
        return GenerationRequest(
            prompts=to_chat_prompt(
                self.messages,
                self.add_generation_prompt,
                self.chat_template_kwargs,
                tools=tool_use.tools if tool_use else (),
                continue_final_message=self.continue_final_message,
            ),
            tool_use=tool_use,
            has_parsed_output=True,
            separates_reasoning=self.separate_reasoning is not False,
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
