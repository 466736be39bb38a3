"""Schemathesis' cases for our routes, and what is asked of every answer.

The schema is used as it is served, and once more with the bounds that only a running cluster knows
(its vocabulary, its context): few random requests get past those.
"""

import copy
import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from requests import Response, Session
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
_NUMBER_OR_NULL: Json = {"type": ["number", "null"]}
_CONFORMING = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HASTE_SECONDS = 20.0  # seconds: who asks for an answer in less may be told that the time was up


def case_strategy(
    document: Json, path: str, method: str, *, good: bool
) -> st.SearchStrategy[Case[Any]]:
    """Requests that the schema allows, or (not `good`) that it forbids."""
    mode = GenerationMode.POSITIVE if good else GenerationMode.NEGATIVE
    strategy: st.SearchStrategy[Case[Any]] = schemathesis.openapi.from_dict(document)[path][
        method
    ].as_strategy(generation_mode=mode)
    return strategy


def with_whole_numbers(case: Case[Any]) -> Case[Any]:
    """With whole numbers as every client writes them: to JSON Schema 7.0 is an integer, to us it is
    none."""
    case.body = _whole(case.body)
    return case


def _whole(value: Any) -> Any:
    match value:
        case dict():
            return {name: _whole(part) for name, part in value.items()}
        case list():
            return [_whole(part) for part in value]
        case float() if value.is_integer():
            return int(value)
    return value


def narrow_schema(
    document: Json, vocabulary: int, model: str, longest: int, *, texts: bool
) -> Json:
    """The same schema, of requests that a cluster with such bounds serves. `texts`: it has a
    tokenizer."""
    document = copy.deepcopy(document)
    token = {"type": "integer", "minimum": 0, "maximum": vocabulary - 1}
    tokens = {"type": "array", "minItems": 1, "maxItems": longest, "items": token}
    prompts = {"type": "array", "minItems": 1, "maxItems": 3, "items": tokens}
    bounds: Json = {
        "model": {"enum": [None, model]},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 8},
        "max_completion_tokens": {"type": "null"},
        "min_tokens": {"type": ["integer", "null"], "minimum": 0, "maximum": 1},
        "top_k": {"type": ["integer", "null"], "minimum": 0, "maximum": vocabulary},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
        "best_of": {"type": "null"},
        "stop_token_ids": {"type": ["array", "null"], "maxItems": 4, "items": token},
        "logit_bias": {"type": ["object", "null"], "maxProperties": 0},
        "tokens": {"type": "array", "maxItems": longest, "items": token},
    }
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        properties = document["components"]["schemas"][name]["properties"]
        properties.update({field: bound for field, bound in bounds.items() if field in properties})
    schemas = document["components"]["schemas"]
    schemas["ContentPart"] = {
        "type": "object",
        "required": ["type", "text"],
        "additionalProperties": False,
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    }
    schemas["ChatMessageParam"]["properties"]["role"] = {"enum": ["system", "user", "assistant"]}
    completion = schemas["CompletionRequest"]["properties"]
    words = {"type": "string", "minLength": 1}
    several = {"type": "array", "minItems": 1, "maxItems": 3, "items": words}
    completion["prompt"] = {
        "anyOf": [tokens, prompts, words, several] if texts else [tokens, prompts]
    }
    if not texts:
        completion["stop"] = {"type": "null"}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.pop("parameters", None)
    return document


def send_case(case: Case[Any], url: str, session: Session, timeout: float) -> Response:
    """All of the answer: the tool's own sending leaves a stream after some events."""
    return session.request(**case.as_transport_kwargs(base_url=url), timeout=timeout)


def check_response(case: Case[Any], response: Response, *, strict: bool) -> None:
    """`strict`: what the schema forbids must have been refused."""
    hasty = _number(response.request.headers.get("x-request-timeout")) < HASTE_SECONDS
    if response.status_code == 504 and hasty:
        return
    case.validate_response(
        response, checks=[*_CONFORMING, *([negative_data_rejection] if strict else [])]
    )
    if response.headers["content-type"].startswith("text/event-stream"):
        check_stream(response.content, hasty=hasty)


def check_stream(content: bytes, *, hasty: bool = False) -> None:
    """Every event is JSON, and the last one [DONE]."""
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    told = [json.loads(event) for event in events if event != b"[DONE]"]
    errors = [event["error"] for event in told if "error" in event]
    if errors and hasty:
        assert [error["code"] for error in errors] == ["deadline_exceeded"]
        return
    assert errors == []
    assert events[-1] == b"[DONE]"
    assert all(event["choices"] or event["usage"] for event in told)


def _number(text: str | bytes | None) -> float:
    try:
        return float(text) if text is not None else float("inf")
    except ValueError:
        return float("inf")


def admin_document() -> Json:
    """The operators' port, which serves no document of its own."""
    drain = {
        "type": "object",
        "required": ["node"],
        "additionalProperties": False,
        "properties": {
            "node": {"anyOf": [{"type": "string"}, {"enum": ["prefill-1", "decode-1"]}]},
            "undrain": {"type": "boolean"},
            "timeout": {**_NUMBER_OR_NULL, "minimum": 0, "maximum": 1e6},
        },
    }
    wanted = {
        "name": "request_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    paths = {
        path: {"get": _page()} for path in ("/livez", "/readyz", "/admin/status", "/admin/ledger")
    }
    paths["/admin/explain/{request_id}"] = {"get": _page() | {"parameters": [wanted]}}
    body = {"required": True, "content": {"application/json": {"schema": drain}}}
    paths["/admin/drain"] = {"post": _page() | {"requestBody": body}}
    return {"openapi": "3.1.0", "info": {"title": "admin", "version": "1"}, "paths": paths}


def _page() -> Json:
    good = {"description": "good", "content": {"application/json": {"schema": {"type": "object"}}}}
    bad = {"description": "refused", "content": {"application/json": {"schema": _ERROR}}}
    return {"responses": {"200": good, "400": bad, "404": bad, "405": bad, "413": bad}}
