"""How HTTP and gRPC ask for structured output: equal requests become equal grammars."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from baton.limits import MAX_GRAMMAR_BYTES
from baton.pb import generation_pb2 as pb
from baton.pb.common_pb2 import TokenIds
from baton.types import GrammarKind, StructuredOutput
from tests.integration.frontend.compatibility.openai_field_tables import GOOD_BODIES, PATHS
from tests.integration.frontend.frontend_harness import (
    FrontendHarness,
    finished_event,
    running_frontend,
)
from tests.small_tokenizers import chat_tokenizer
from tests.structured.fake_grammars import REFUSED_GRAMMAR

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["é", "x"]}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["é","x"]}}}'
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
TAGS_TEXT = '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f"]}'
COMPACT = TEXT[:-1] + ',"x-guidance":{"whitespace_flexible":false}}'
CLOSED = TEXT[:-1] + ',"additionalProperties":false}'
SPACED = TEXT[:-1] + ',"x-guidance":{"whitespace_flexible":true,"whitespace_pattern":" ?"}}'
JSON, GRAMMAR = GrammarKind.JSON, GrammarKind.GRAMMAR

# Fields of HTTP, the message of gRPC if there is one, kind and text.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, GrammarKind, str]] = {
    "schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        {"json": TEXT},
        JSON,
        TEXT,
    ),
    "object": (
        {"response_format": {"type": "json_object"}},
        {"json_object": True},
        JSON,
        '{"type":"object"}',
    ),
    "tags_format": (
        {"response_format": {"type": "structural_tag", **TAGS}},
        None,
        GrammarKind.STRUCTURAL_TAG,
        TAGS_TEXT,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, {"json": TEXT}, JSON, TEXT),
    "json_text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA, indent=2)}},
        {"json": json.dumps(SCHEMA)},
        JSON,
        TEXT,
    ),
    "json_true": ({"structured_outputs": {"json": True}}, {"json": "true"}, JSON, "{}"),
    "own_options": (
        {"structured_outputs": {"json": SCHEMA | {"x-guidance": {"lenient": True}}}},
        None,
        JSON,
        TEXT,
    ),
    "compact": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"json": TEXT, "disable_any_whitespace": True},
        JSON,
        COMPACT,
    ),
    "closed": (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        {"json": TEXT, "disable_additional_properties": True},
        JSON,
        CLOSED,
    ),
    "spaced": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        {"json": TEXT, "whitespace_pattern": " ?"},
        JSON,
        SPACED,
    ),
    "vllm_object": (
        {"structured_outputs": {"json_object": True, "regex": None, "disable_fallback": False}},
        {"json_object": True},
        JSON,
        '{"type":"object"}',
    ),
    "regex": (
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"regex": "[a-z]+"},
        GrammarKind.REGEX,
        "[a-z]+",
    ),
    "choice": (
        {"structured_outputs": {"choice": ["a", "é"]}},
        {"choice": {"texts": ["a", "é"]}},
        GrammarKind.CHOICE,
        '["a","é"]',
    ),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"lark": 'start: "a"'},
        GRAMMAR,
        'start: "a"',
    ),
    "tags": (
        {"structured_outputs": {"structural_tag": TAGS}},
        {"structural_tag": TAGS_TEXT},
        GrammarKind.STRUCTURAL_TAG,
        TAGS_TEXT,
    ),
}
DEEP: dict[str, Any] = {}
for _ in range(400):
    DEEP = {"a": DEEP}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "refused": ({"structured_outputs": {"regex": REFUSED_GRAMMAR}}, "structured_outputs: it is"),
    "both": (
        {
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        "response_format and structured_outputs",
    ),
    "two": ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs has"),
    "none": ({"structured_outputs": {}}, "structured_outputs has none"),
    "no_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema is missing",
    ),
    "not_json": ({"structured_outputs": {"json": "{"}}, "structured_outputs: the schema is not"),
    "number": ({"structured_outputs": {"json": "5"}}, "structured_outputs: the schema must be"),
    "empty_choice": ({"structured_outputs": {"choice": []}}, "structured_outputs: choice is empty"),
    "large": (
        {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}},
        f"structured_outputs has {MAX_GRAMMAR_BYTES + 1} bytes",
    ),
    "unknown": ({"structured_outputs": {"x": 1}}, "structured_outputs.x"),
    "old": ({"guided_json": SCHEMA}, "guided_json"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front() -> AsyncIterator[FrontendHarness]:
    async with running_frontend(text=chat_tokenizer()) as running:
        running.backend.script = lambda generation: generation.emit_events(finished_event())
        yield running


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("route", PATHS)
async def test_http_forms_become_grammars(front: FrontendHarness, route: str, form: str) -> None:
    fields, _, kind, text = FORMS[form]
    front.backend.requests.clear()
    response = await front.http.post(PATHS[route], json=GOOD_BODIES[route] | {"n": 2} | fields)
    assert response.status_code == 200, response.text
    asked = [request.sampling.structured_output for request in front.backend.requests]
    assert asked == [StructuredOutput(kind, text)] * 2


@pytest.mark.parametrize("form", [form for form, case in FORMS.items() if case[1] is not None])
async def test_grpc_forms_become_the_same_grammars(front: FrontendHarness, form: str) -> None:
    _, message, kind, text = FORMS[form]
    front.backend.requests.clear()
    asked = pb.GenerateRequest(
        token_ids=TokenIds(ids=[1]), structured_output=pb.StructuredOutput(**message or {})
    )
    await front.stub.GenerateOnce(asked)
    assert front.backend.requests[0].sampling.structured_output == StructuredOutput(kind, text)


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_grammars_are_refused_by_name(front: FrontendHarness, case: str) -> None:
    fields, message = WRONG[case]
    front.backend.requests.clear()
    response = await front.http.post(PATHS["chat"], json=GOOD_BODIES["chat"] | fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["error"]["param"] in (*fields, "structured_outputs.x")
    assert front.backend.requests == []


@pytest.mark.parametrize(
    "message",
    [{}, {"json_object": False}, {"choice": {}}, {"json": "["}, {"regex": REFUSED_GRAMMAR}],
)
async def test_grpc_refuses_wrong_grammars(front: FrontendHarness, message: dict[str, Any]) -> None:
    asked = pb.GenerateRequest(
        token_ids=TokenIds(ids=[1]), structured_output=pb.StructuredOutput(**message)
    )
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await front.stub.GenerateOnce(asked)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(failed.value.details()).startswith("structured_output")


async def test_deeply_nested_schemas_are_refused(front: FrontendHarness) -> None:
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        {"structured_outputs": {"json": DEEP, "disable_additional_properties": True}},
    ):
        response = await front.http.post(PATHS["chat"], json=GOOD_BODIES["chat"] | fields)
        assert response.status_code in (200, 400)
