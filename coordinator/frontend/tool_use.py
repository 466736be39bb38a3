"""The tools of a request, and what its output must be if it has to call one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may or must call.

    Each tool is an object as chat templates show it: `{"type": "function", "function": {...}}`.
    """

    tools: Sequence[JsonObject]
    choice: Literal["auto", "required", "named"]
    function_name: str = ""  # of the function that must be called, with the choice `named`
    is_parallel: bool = True  # whether an answer may have several calls

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"


def build_output_schema(use: ToolUse) -> JsonObject | None:
    """Return the JSON schema of the whole output, or None where the model chooses.

    It is the arguments of the named function; for `required`, an array of calls with a name and
    `parameters`. A function without parameters takes an empty object, and arguments are objects
    where the schema of the parameters does not say it.
    """
    if use.choice == "auto":
        return None
    functions = list(map(_name_and_parameters, use.tools))
    if use.choice == "named":
        return next(parameters for name, parameters in functions if name == use.function_name)
    calls = [_call_schema(name, index) for index, (name, _) in enumerate(functions)]
    return {
        "type": "array",
        "minItems": 1,
        **({} if use.is_parallel else {"maxItems": 1}),
        "items": {"anyOf": calls},
        "$defs": {
            str(index): _move_references(parameters, f"#/$defs/{index}")
            for index, (_, parameters) in enumerate(functions)
        },
    }


def _name_and_parameters(tool: JsonObject) -> tuple[str, JsonObject]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    parameters = function.get("parameters") or {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    is_plain = not parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
    return function["name"], {"type": "object", **parameters} if is_plain else parameters


def _call_schema(name: str, index: int) -> JsonObject:
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "parameters": {"$ref": f"#/$defs/{index}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _move_references(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own root refer to `root`."""
    if isinstance(schema, list):
        return [_move_references(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: root + value.removeprefix("#")
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _move_references(value, root)
        for name, value in schema.items()
    }
