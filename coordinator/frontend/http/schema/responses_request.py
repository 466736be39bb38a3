"""The wire format of POST /v1/responses, and its conversion to a request for a conversation."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import msgspec

from baton.errors import InvalidRequest, RequestRejected
from baton.limits import check_message_count
from coordinator.frontend.http.schema.body_decoder import RequestBody, truncate_text
from coordinator.frontend.http.schema.chat_messages import ChatMessageParam, TemplateArguments
from coordinator.frontend.http.schema.generation_requests import ChatRequest
from coordinator.frontend.http.schema.structured_output_fields import (
    JsonSchemaFormat,
    ResponseFormat,
)
from coordinator.frontend.http.schema.tools import (
    FunctionCallParam,
    FunctionNameParam,
    FunctionParam,
    NamedToolChoiceParam,
    ToolCallParam,
    ToolParam,
)
from coordinator.frontend.http.schema.unsupported_fields import RESPONSES_NO_OPS, NoOpValues
from coordinator.frontend.request import GenerationRequest

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_MESSAGE_INDEX = re.compile(r"^messages\[(\d+)\]")
# Names of a conversation's fields in this format, for error messages.
_PARAM_NAMES = {
    "messages": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}


class InputPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of an item's content. Only texts are served."""

    type: str
    text: str | None = None
    annotations: Any = None
    logprobs: Any = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    refusal: Any = None


InputContent = str | list[InputPart]


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message, a call of a function, its result, or reasoning, as an answer gave them."""

    type: str | None = None
    role: str | None = None
    content: InputContent | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: InputContent | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ResponsesToolParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool. Only the type `function` is served."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoiceParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that the answer must call."""

    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer's text is: any text, or JSON."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # no padding is ever added


class ResponsesRequest(RequestBody, frozen=True, kw_only=True):
    """The body. Nothing of a response is kept: each request has its whole conversation."""

    no_ops: ClassVar[NoOpValues] = RESPONSES_NO_OPS

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[ResponsesToolParam] | None = None
    tool_choice: str | ResponsesToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    request_id: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @property
    def has_named_call(self) -> bool:
        return isinstance(self.tool_choice, ResponsesToolChoiceParam)

    def to_generation_request(
        self, timeout: float | None, client_id: str | None
    ) -> GenerationRequest:
        """Raises InvalidRequest."""
        if self.store:
            _reject(
                "store", "store is true: no response is kept here, so send false or leave it out"
            )
        if self.previous_response_id is not None:
            _reject(
                "previous_response_id",
                "previous_response_id is given: no response is kept here, so send the whole "
                "conversation as input",
            )
        converter = _InputConverter(self.instructions)
        converter.add_input(self.input)
        with _name_fields(converter.origins):
            request = self._to_chat_request(converter.messages).to_generation_request(
                timeout, client_id
            )
        names = {
            name: _PARAM_NAMES.get(shown, shown) for name, shown in request.param_names.items()
        }
        return replace(
            request,
            param_names={"max_tokens": "max_output_tokens", "messages": "input", **names},
        )

    def _to_chat_request(self, messages: list[ChatMessageParam]) -> ChatRequest:
        choice = self.tool_choice
        return ChatRequest(
            messages=messages,
            tools=[_to_tool(index, tool) for index, tool in enumerate(self.tools or ())],
            tool_choice=(
                NamedToolChoiceParam(FunctionNameParam(choice.name))
                if isinstance(choice, ResponsesToolChoiceParam)
                else choice
            ),
            response_format=_to_response_format(self.text),
            **{name: getattr(self, name) for name in _SHARED_FIELDS},
            max_completion_tokens=self.max_output_tokens,
        )


# Fields that mean the same in a request for a conversation.
_SHARED_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("repetition_penalty", "stream", "parallel_tool_calls", "metadata", "user", "request_id"),
    *("prompt_cache_key", "safety_identifier", "priority", "chat_template_kwargs"),
)


def _to_tool(index: int, tool: ResponsesToolParam) -> ToolParam:
    if tool.type != "function":
        _reject(
            "tools",
            f"tools[{index}] has the type {truncate_text(tool.type)!r}: only function is served",
        )
    function = FunctionParam(tool.name, tool.description, tool.parameters, tool.strict)
    return ToolParam(tool.type, function)


def _to_response_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    given = text.format
    schema = (
        JsonSchemaFormat(name=given.name, schema=given.schema, strict=given.strict)
        if given.type == "json_schema"
        else None
    )
    return ResponseFormat(type=given.type, json_schema=schema)


class _InputConverter:
    """Converts the items of the input to messages.

    Calls and reasoning are parts of the assistant's message beside them.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[ChatMessageParam] = []
        self.origins: list[int] = []  # for each message, the index of the item that began it
        self._reasoning = ""  # of the next message of the assistant
        if instructions is not None:
            self._add_message(0, ChatMessageParam(role="system", content=instructions))

    def add_input(self, given: str | list[InputItem] | None) -> None:
        """Raises InvalidRequest."""
        if given is None:
            _reject("input", "input is missing: it must be a text or a list of items")
        if isinstance(given, str):
            self._add_message(0, ChatMessageParam(role="user", content=given))
            return
        with _name_fields(()):
            check_message_count(len(given))
        for index, item in enumerate(given):
            self._add_item(index, item)

    def _add_item(self, index: int, item: InputItem) -> None:
        where = f"input[{index}]"
        match item.type or "message":
            case "message" if item.role is not None and item.content is not None:
                text = _join_texts(f"{where}.content", item.content)
                reasoning = self._take_reasoning() if item.role == "assistant" else None
                self._add_message(
                    index,
                    ChatMessageParam(role=item.role, content=text, reasoning_content=reasoning),
                )
            case "function_call" if item.name is not None and item.call_id is not None:
                function = FunctionCallParam(item.name, item.arguments)
                self._add_call(index, ToolCallParam(function=function, id=item.call_id))
            case "function_call_output" if item.output is not None and item.call_id is not None:
                text = _join_texts(f"{where}.output", item.output)
                self._add_message(
                    index,
                    ChatMessageParam(role="tool", content=text, tool_call_id=item.call_id),
                )
            case "reasoning":
                self._reasoning = _join_texts(
                    f"{where}.content", item.content or item.summary or ""
                )
            case "message" | "function_call" | "function_call_output" as kind:
                needed = {"message": "role and content", "function_call": "name and call_id"}
                _reject(
                    "input",
                    f"{where} is a {kind}: it needs {needed.get(kind, 'output and call_id')}",
                )
            case kind:
                _reject(
                    "input",
                    f"{where} has the type {truncate_text(kind)!r}: only message, function_call, "
                    "function_call_output and reasoning are served",
                )

    def _add_call(self, index: int, call: ToolCallParam) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._reasoning:
            reasoning = self._take_reasoning()
            last = ChatMessageParam(role="assistant", reasoning_content=reasoning)
            self._add_message(index, last)
        self.messages[-1] = msgspec.structs.replace(
            last, tool_calls=[*(last.tool_calls or ()), call]
        )

    def _add_message(self, index: int, message: ChatMessageParam) -> None:
        self.messages.append(message)
        self.origins.append(index)

    def _take_reasoning(self) -> str | None:
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning or None


def _join_texts(where: str, content: InputContent) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            _reject(
                "input",
                f"{where}[{index}] has the type {truncate_text(part.type)!r}: only texts are "
                "served",
            )
    return "\n".join(part.text or "" for part in content)


@contextmanager
def _name_fields(origins: Sequence[int]) -> Iterator[None]:
    """Make errors about a conversation's fields name those of this format.

    `origins` are the indices of the items that the messages were made of.
    """
    try:
        yield
    except RequestRejected as error:
        param = error.param or ""

        def name_item(found: re.Match[str]) -> str:
            return f"input[{origins[int(found[1])]}]"

        message = _MESSAGE_INDEX.sub(name_item, error.message)
        if param in _PARAM_NAMES:
            message = message.replace(param, _PARAM_NAMES[param], 1)
        raise type(error)(message, param=_PARAM_NAMES.get(param, error.param)) from None


def _reject(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
