"""The wire formats of tools, `tool_choice` and the calls in a conversation."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import msgspec

from baton.errors import InvalidRequest
from baton.limits import (
    MAX_TOOL_ARGUMENT_BYTES,
    MAX_TOOL_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOL_DEPTH,
    MAX_TOOL_NAME_CHARACTERS,
    MAX_TOOLS,
)
from baton.types import StructuredOutput
from coordinator.frontend.http.schema.body_decoder import (
    blank_escapes,
    check_json_size,
    truncate_text,
)
from coordinator.frontend.request import rename_error_params
from coordinator.frontend.tool_use import ToolUse, build_output_schema
from coordinator.structured_output.request_forms import json_schema_output
from coordinator.text.tokenizer import utf8_size

TOOL_NAME_PATTERN = rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARACTERS}}}"
_TOOL_NAME = re.compile(TOOL_NAME_PATTERN, re.ASCII)
_CHOICES = ("none", "auto", "required")


class FunctionParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool. Only the type `function` is served."""

    type: str
    function: FunctionParam | None = None

    def to_template_tool(self) -> dict[str, object]:
        """Return the tool as a chat template shows it."""
        assert self.function is not None
        shown: dict[str, object] = {"name": self.function.name}
        shown.update(
            (field, value)
            for field in ("description", "parameters")
            if (value := getattr(self.function, field)) is not None
        )
        return {"type": "function", "function": shown}


class FunctionNameParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoiceParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that the answer must call."""

    function: FunctionNameParam
    type: Literal["function"] = "function"


ToolChoiceParam = str | NamedToolChoiceParam


class FunctionCallParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A call in a message of the assistant. `index` comes from clients that kept stream events."""

    function: FunctionCallParam
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


def parse_tool_use(
    tools: Sequence[ToolParam] | None,
    choice: ToolChoiceParam | None,
    parallel: bool | None,
) -> ToolUse | None:
    """Return the tools that an answer may call, None if it may call none.

    Raises InvalidRequest.
    """
    if isinstance(choice, str) and choice not in _CHOICES:
        _reject_choice(f"{truncate_text(choice)!r}: it must be none, auto, required or a function")
    if not tools:
        if choice not in (None, "none", "auto"):
            _reject_choice("given, but tools is missing: there is no function to call")
        return None
    check_tools(tools)
    if choice == "none":
        return None
    shown = [tool.to_template_tool() for tool in tools]
    if isinstance(choice, NamedToolChoiceParam):
        name = choice.function.name
        if not any(tool.function and tool.function.name == name for tool in tools):
            _reject_choice(f"{truncate_text(name)!r}: tools has no such function")
        return ToolUse(shown, "named", name, is_parallel=False)
    return ToolUse(
        shown, "required" if choice == "required" else "auto", is_parallel=parallel is not False
    )


def constrain_output(
    tool_use: ToolUse | None, given: StructuredOutput | None, given_by: str
) -> StructuredOutput | None:
    """Return what the output must obey: the schema of forced calls, else what was `given`.

    `given_by` is the field that `given` is from: `response_format` describes the text of an answer,
    so it says nothing about calls. Raises InvalidRequest.
    """
    schema = None if tool_use is None else build_output_schema(tool_use)
    if schema is None:
        return given
    if given is not None and given_by != "response_format":
        _reject_choice(
            f"a call that must be made, but {given_by} also says what the answer has to be: send "
            "one of the two"
        )
    with rename_error_params({"structured_output": "tools"}):
        return json_schema_output(schema)


def check_tools(tools: Sequence[ToolParam]) -> None:
    """Check number, names and sizes. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        _reject("tools", f"tools has {len(tools)} functions: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function" or tool.function is None:
            _reject(
                "tools",
                f"{where} has the type {truncate_text(tool.type)!r}: only "
                '{"type": "function", "function": {...}} is served',
            )
        if not _TOOL_NAME.fullmatch(tool.function.name):
            _reject(
                "tools",
                f"{where}.function.name is {truncate_text(tool.function.name)!r}: names are 1 to "
                f"{MAX_TOOL_NAME_CHARACTERS} of the characters a-z, A-Z, 0-9 and _.:/-",
            )
        _check_depth("tools", f"{where}.function.parameters", tool.function.parameters)
    for name, count in Counter(tool.function.name for tool in tools if tool.function).items():
        if count > 1:
            _reject("tools", f"tools has {count} functions {name!r}: names must differ")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOL_BYTES:
        _reject("tools", f"tools has {size} bytes of JSON: at most {MAX_TOOL_BYTES}")


def check_total_arguments(calls: Iterable[ToolCallParam]) -> None:
    """Check the arguments of all calls of a conversation together, before any is parsed.

    Raises InvalidRequest.
    """
    texts = (call.function.arguments for call in calls)
    size = sum(utf8_size(text) for text in texts if isinstance(text, str))
    if size > MAX_TOOL_ARGUMENT_BYTES:
        _reject(
            "messages",
            f"messages have {size} bytes of tool_calls.function.arguments: at most "
            f"{MAX_TOOL_ARGUMENT_BYTES}",
        )


def to_template_calls(where: str, calls: Sequence[ToolCallParam]) -> list[dict[str, object]]:
    """Convert the calls of a message for the template, which reads arguments as an object.

    Raises InvalidRequest.
    """
    if len(calls) > MAX_TOOL_CALLS:
        _reject("messages", f"{where}.tool_calls has {len(calls)} calls: at most {MAX_TOOL_CALLS}")
    shown: list[dict[str, object]] = []
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}].function"
        arguments = _parse_arguments(f"{place}.arguments", call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
        named = {} if call.id is None else {"id": call.id}
        shown.append({**named, "type": "function", "function": function})
    return shown


def _parse_arguments(where: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    parsed: object = arguments or {}
    if isinstance(parsed, str):
        spelled = parsed.encode(errors="surrogatepass")
        try:
            check_json_size(blank_escapes(spelled))
            parsed = msgspec.json.decode(spelled)
        except InvalidRequest as error:
            _reject("messages", f"{where}: {error.message}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            _reject("messages", f"{where} is not JSON")
    if not isinstance(parsed, dict):
        _reject("messages", f"{where} is not a JSON object")
    _check_depth("messages", where, parsed)
    return parsed


def _check_depth(param: str, where: str, value: object, depth: int = 0) -> None:
    """Raises InvalidRequest for objects and arrays that are nested too deeply."""
    if depth > MAX_TOOL_DEPTH:
        _reject(param, f"{where} is nested more than {MAX_TOOL_DEPTH} levels deep")
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_depth(param, where, item, depth + 1)


def _reject_choice(reason: str) -> NoReturn:
    _reject("tool_choice", f"tool_choice is {reason}")


def _reject(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
