"""The objects of /v1/responses: the response, its items, their parts and its usage."""

from typing import Any

import msgspec

from coordinator.frontend.output import ResponseStream


class OutputText(msgspec.Struct):
    text: str
    type: str = "output_text"
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class OutputMessage(msgspec.Struct):
    id: str
    status: str  # `in_progress`, `completed` or `incomplete`
    content: list[OutputText]
    type: str = "message"
    role: str = "assistant"


class ReasoningItem(msgspec.Struct):
    id: str
    status: str
    content: list[ReasoningText]
    type: str = "reasoning"
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    type: str = "function_call"


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponsesResponse(msgspec.Struct):
    """A response; the fields after `output` repeat the request."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[Any]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float | None
    usage: ResponsesUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


def count_usage(stream: ResponseStream, reasoning_tokens: int) -> ResponsesUsage:
    """The usage of a complete stream."""
    prompt, output = stream.prompt_tokens, stream.completion_tokens
    return ResponsesUsage(
        prompt,
        InputTokensDetails(stream.cached_tokens),
        output,
        OutputTokensDetails(reasoning_tokens),
        prompt + output,
    )
