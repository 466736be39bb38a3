"""The OpenAPI document is valid, describes every route, and says of a body what the route says of
it."""

import json
import re
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.frontend.compatibility.openai_field_tables import (
    FIELD_TABLES,
    GOOD_BODIES,
    PATHS,
)
from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
)

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(front: FrontendHarness) -> Any:
    return (await front.http.get("/openapi.json")).json()


def validator(document: Any, path: str, status: str = "") -> Any:
    operation = next(iter(document["paths"][path].values()))
    part = operation["responses"][status] if status else operation["requestBody"]
    schema = {"components": document["components"], **part["content"]["application/json"]["schema"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


async def test_document_has_every_route(front: FrontendHarness, document: Any) -> None:
    served = {route.path for route in front.apps[0].routes if "docs" not in route.path} - {
        "/openapi.json"
    }
    served = {path.replace(":path}", "}") for path in served}
    assert set(document["paths"]) == served
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == document["components"]["schemas"].keys() & references
    assert "$ref" not in json.dumps(document).replace('"$ref": "#/components/schemas/', "")


@pytest.mark.parametrize("route", list(PATHS))
async def test_request_schemas_match_the_accepted_bodies(
    front: FrontendHarness, document: Any, route: str
) -> None:
    """What the table of fields says is taken is valid, and most of what it says is refused is
    not."""
    check = validator(document, PATHS[route])
    assert check.is_valid(GOOD_BODIES[route])
    passed = []
    for name, field in FIELD_TABLES[route].items():
        values = [
            *field.accepted_values,
            *([field.honoured_value[0]] if field.honoured_value else []),
            *([None] if field.accepts_null else []),
        ]
        for value in values:
            check.validate(GOOD_BODIES[route] | {name: value})
        passed += [
            (name, value)
            for value in field.refused_values
            if check.is_valid(GOOD_BODIES[route] | {name: value})
        ]
    depends = {
        "max_completion_tokens",
        "best_of",
        "stream_options",
        "top_logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
    }  # on others
    assert {name for name, _ in passed} <= depends, passed
    assert not check.is_valid({})
    assert not check.is_valid(GOOD_BODIES[route] | {"colour": "red"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", GOOD_BODIES["completions"] | {"n": 2, "return_token_ids": True}),
        ("/v1/chat/completions", GOOD_BODIES["chat"]),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/tokenize", GOOD_BODIES["chat"] | {"max_tokens": 1}),
        ("/detokenize", {"tokens": [1]}),
        ("/detokenize", {"tokens": None}),
        ("/v1/models", None),
        ("/health", None),
        ("/version", None),
    ],
)
async def test_response_schemas_match_the_answers(
    front: FrontendHarness, document: Any, path: str, body: Any
) -> None:
    response = await (front.http.get(path) if body is None else front.http.post(path, json=body))
    validator(document, path, str(response.status_code)).validate(response.json())
    if body is not None:
        assert validator(document, path).is_valid(body) == (response.status_code == 200)
