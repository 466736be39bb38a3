"""The HTTP part of the API reference, from the OpenAPI document, and the admin port's routes."""

import json
from collections.abc import Iterator
from typing import Any

from coordinator.frontend.http.openapi import build_openapi_document
from tools.api_reference.markdown import code, heading, link, table

OpenApiObject = dict[str, Any]

ADMIN_ROUTES = (
    ("GET /livez", "The process lives"),
    ("GET /readyz", "A warm-up token went through the whole cluster; else 503 with the reason"),
    ("GET /metrics", "Prometheus' text format: [architecture.md](architecture.md#metrics)"),
    ("GET /admin/status", "[StatusResponse](#message-statusresponse)"),
    ("GET /admin/ledger", "[LedgerResponse](#message-ledgerresponse)"),
    (
        "GET /admin/explain/{request_id}",
        "[ExplainResponse](#message-explainresponse); 404 if it is not kept, "
        "400 if several had that x-request-id",
    ),
    (
        "POST /admin/drain",
        '`{"node": NAME}`, with `"timeout": SECONDS` or `"undrain": true`: '
        "[DrainResponse](#message-drainresponse)",
    ),
    ("GET /", "Not available: 501"),
    ("GET /admin/ratio", "[Ratio](#message-ratio)"),
    ("GET /admin/ratio/advice", "[RatioAdvice](#message-ratioadvice); `?slo=ttft=500ms,tpot=50ms`"),
    (
        "POST /admin/ratio",
        '`{"ratio": "P:D"}`, or `{"auto": true}` with `"slo"`, or `{"auto": false}`; '
        'with `"flip_timeout": SECONDS`: '
        "[Ratio](#message-ratio)",
    ),
)
_RANGES = (
    ("minimum", "{} or more"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("minLength", "{} character or more"),
    ("maxLength", "at most {} characters"),
    ("minItems", "{} item or more"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} entries"),
)


def error_table() -> list[str]:
    """Return the error responses. Raises ValueError unless all routes have the same."""
    responses = {
        tuple(
            (status, response["description"])
            for status, response in operation["responses"].items()
            if status != "200"
        )
        for methods in build_openapi_document("")["paths"].values()
        for operation in methods.values()
    }
    (rows,) = responses
    return table(("status", "when"), rows)


def render_http_section() -> list[str]:
    document = build_openapi_document("")
    lines = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _operation_lines(method.upper(), path, operation)
    lines += heading(3, "The admin port")
    lines += [
        "Port 9000 (`--admin-port`). Answers are the messages of `baton.v1.Cluster`, below, "
        "as JSON of the same names.",
        "",
    ]
    lines += table(("path", "answers"), ((code(path), answer) for path, answer in ADMIN_ROUTES))
    lines += heading(3, "Bodies")
    for name, schema in document["components"]["schemas"].items():
        lines += _object_lines(name, schema)
    return lines


def _operation_lines(method: str, path: str, operation: OpenApiObject) -> list[str]:
    lines = heading(3, f"{method} {path}")
    lines += [operation["summary"] + ".", ""]
    rows = []
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        rows.append(("body", _type_text(body)))
        rows += [
            (f"header {code(header['name'])}, optional", header["description"])
            for header in operation["parameters"]
        ]
    if "200" in operation["responses"]:
        answer = operation["responses"]["200"]["content"]
        has_stream = "text/event-stream" in answer
        streams = ", or server-sent events if `stream` is true" if has_stream else ""
        rows.append(("answer", _type_text(answer["application/json"]["schema"]) + streams))
    return lines + (table(("", ""), rows) if rows else [])


def _object_lines(name: str, schema: OpenApiObject) -> list[str]:
    lines = heading(4, f"object {name}")
    if "description" in schema:
        lines += [schema["description"], ""]
    needed = [tuple(alternative["required"]) for alternative in schema.get("oneOf", ())] or [
        tuple(schema.get("required", ()))
    ]
    rows: list[tuple[str, ...]] = []
    fixed: list[str] = []
    for field, shape in schema["properties"].items():
        if "enum" in shape and None in shape["enum"]:
            fixed.append(
                f"`{field}` ({', '.join(code(json.dumps(value)) for value in shape['enum'])})"
            )
            continue
        must = (
            "required"
            if len(needed) == 1 and field in needed[0] and "additionalProperties" in schema
            else ""
        )
        bounds = ", ".join(filter(None, (must, _bounds_text(shape))))
        rows.append((code(field), _type_text(shape), bounds, shape["description"]))
    headings: tuple[str, ...] = ("field", "type", "bounds", "what it is")
    if not any(bounds for _, _, bounds, _ in rows):
        headings, rows = (*headings[:2], headings[3]), [(*row[:2], row[3]) for row in rows]
    lines += table(headings, rows)
    if fixed:
        lines += [
            "Accepted with these values alone, and without effect: " + ", ".join(fixed) + ".",
            "",
        ]
    return lines


def _type_text(shape: OpenApiObject) -> str:
    if "$ref" in shape:
        return link("object", shape["$ref"].rpartition("/")[2])
    if "anyOf" in shape:
        return " or ".join(
            dict.fromkeys(
                _type_text(alternative)
                for alternative in shape["anyOf"]
                if alternative != {"type": "null"}
            )
        )
    kind = shape.get("type", "any")
    if kind == "array":
        return f"list of {_type_text(shape['items'])}" if "items" in shape else "list"
    if kind == "object" and isinstance(shape.get("additionalProperties"), dict):
        return f"object of {_type_text(shape['additionalProperties'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _bounds_text(shape: OpenApiObject) -> str:
    bounds = list(_range_texts(shape))
    if "enum" in shape:
        bounds.append(", ".join(code(str(value)) for value in shape["enum"]))
    inner = [
        nested
        for key in ("items", "additionalProperties")
        if isinstance(nested := shape.get(key), dict)
    ]
    bounds += [
        f"each {text}" for nested in inner for text in [", ".join(_range_texts(nested))] if text
    ]
    return "; ".join(bounds)


def _range_texts(shape: OpenApiObject) -> Iterator[str]:
    low, high = shape.get("minimum"), shape.get("maximum")
    if low is not None and high is not None:
        yield f"{_number(low)} to {_number(high)}"
        shape = {key: value for key, value in shape.items() if key not in ("minimum", "maximum")}
    for key, template in _RANGES:
        if key in shape:
            yield template.format(_number(shape[key]))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
