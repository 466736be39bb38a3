"""The OpenAPI document is valid, describes every route, and says of a body what the route says of it."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.front_fixtures import Front, done, serving
from tests.integration.front_text import chatting_tokenizer
from tests.integration.test_front_fields import GOOD, PATHS, TABLES

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[Front]:
    async with serving(text=chatting_tokenizer()) as running:
        running.brain.script = lambda generation: generation.give(done())
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def document(front: Front) -> Any:
    return (await front.http.get("/openapi.json")).json()


def validator(document: Any, path: str, status: str = "") -> Any:
    operation = next(iter(document["paths"][path].values()))
    part = operation["responses"][status] if status else operation["requestBody"]
    schema = {"components": document["components"], **part["content"]["application/json"]["schema"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


async def test_every_route_is_there(front: Front, document: Any) -> None:
    served = {route.path for route in front.apps[0].routes if "docs" not in route.path} - {"/openapi.json"}
    served = {path.replace(":path}", "}") for path in served}
    assert set(document["paths"]) == served
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == document["components"]["schemas"].keys() & references
    assert "$ref" not in json.dumps(document).replace('"$ref": "#/components/schemas/', "")


@pytest.mark.parametrize("route", list(PATHS))
async def test_bodies(front: Front, document: Any, route: str) -> None:
    """What the table of fields says is taken is valid, and most of what it says is refused is not."""
    check = validator(document, PATHS[route])
    assert check.is_valid(GOOD[route])
    passed = []
    for name, field in TABLES[route].items():
        values = [*field.accepted, *([field.honoured[0]] if field.honoured else []), *([None] if field.null else [])]
        for value in values:
            check.validate(GOOD[route] | {name: value})
        passed += [(name, value) for value in field.refused if check.is_valid(GOOD[route] | {name: value})]
    depends = {"max_completion_tokens", "best_of", "stream_options", "top_logprobs", "logit_bias", "tools"}  # on others
    assert {name for name, _ in passed} <= depends, passed
    assert not check.is_valid({})
    assert not check.is_valid(GOOD[route] | {"colour": "red"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", GOOD["completions"] | {"n": 2, "return_token_ids": True}),
        ("/v1/chat/completions", GOOD["chat"]),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/tokenize", GOOD["chat"] | {"max_tokens": 1}),
        ("/detokenize", {"tokens": [1]}),
        ("/detokenize", {"tokens": None}),
        ("/v1/models", None),
        ("/health", None),
        ("/version", None),
    ],
)
async def test_answers(front: Front, document: Any, path: str, body: Any) -> None:
    response = await (front.http.get(path) if body is None else front.http.post(path, json=body))
    validator(document, path, str(response.status_code)).validate(response.json())
    if body is not None:
        assert validator(document, path).is_valid(body) == (response.status_code == 200)
