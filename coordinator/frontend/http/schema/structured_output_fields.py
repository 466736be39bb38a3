"""The fields of a request that ask for structured output: OpenAI's and vLLM's."""

from typing import Any, Literal

import msgspec

from baton.errors import InvalidRequest
from baton.types import StructuredOutput
from coordinator.frontend.request import rename_error_params
from coordinator.structured_output import request_forms


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named JSON schema. It is enforced whether it is `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer is: a text, or JSON."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the answer obeys: exactly one of the first six."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None


def read_structured_output(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> tuple[StructuredOutput | None, str]:
    """Return what the answer must obey, and the field that says so. Raises InvalidRequest."""
    if structured_outputs is None:
        with rename_error_params({"structured_output": "response_format"}):
            return _read_response_format(response_format), "response_format"
    if response_format is not None and response_format.type != "text":
        raise InvalidRequest(
            "response_format and structured_outputs are given: they mean the same, send one",
            param="structured_outputs",
        )
    with rename_error_params({"structured_output": "structured_outputs"}):
        return _read_structured_outputs(structured_outputs), "structured_outputs"


def _read_response_format(wanted: ResponseFormat | None) -> StructuredOutput | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return request_forms.json_object_output()
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise InvalidRequest(
                "response_format.json_schema.schema is missing: it must be a JSON schema",
                param="response_format",
            )
        return request_forms.json_schema_output(wanted.json_schema.schema)
    if wanted.structures is None or wanted.triggers is None:
        raise InvalidRequest(
            "response_format of type structural_tag needs structures and triggers",
            param="response_format",
        )
    return request_forms.structural_tag_output(
        {"structures": wanted.structures, "triggers": wanted.triggers}
    )


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _read_structured_outputs(wanted: StructuredOutputs) -> StructuredOutput:
    given = [kind for kind in _KINDS if getattr(wanted, kind) is not None]
    if wanted.json_object is False:
        given.remove("json_object")
    if len(given) != 1:
        shown = ", ".join(given) or "none"
        raise InvalidRequest(
            f"structured_outputs has {shown}: it must have exactly one of {', '.join(_KINDS)}",
            param="structured_outputs",
        )
    if wanted.regex is not None:
        return request_forms.regex_output(wanted.regex)
    if wanted.choice is not None:
        return request_forms.choice_output(wanted.choice)
    if wanted.grammar is not None:
        return request_forms.grammar_output(wanted.grammar)
    if wanted.structural_tag is not None:
        return request_forms.structural_tag_output(wanted.structural_tag)
    return request_forms.json_schema_output(
        {"type": "object"} if wanted.json is None else wanted.json,
        compact=bool(wanted.disable_any_whitespace),
        closed=bool(wanted.disable_additional_properties),
        whitespace_pattern=wanted.whitespace_pattern or "",
    )
