"""Builds the OpenAPI document: every route, its request with bounds, its response and errors.

The schemas come from the types that decode and encode them. This file adds the bounds that types
cannot express, from baton/limits.py.
"""

import re
from typing import Any

import msgspec

from baton import limits
from baton.limits import MAX_SEED
from coordinator.frontend.http.errors import ErrorBody
from coordinator.frontend.http.field_descriptions import (
    NO_OP_DESCRIPTION,
    REQUEST_FIELDS,
    RESPONSE_FIELDS,
    describe_field,
)
from coordinator.frontend.http.info_routes import Health, ModelCard, ModelList, Version
from coordinator.frontend.http.responses.chat import ChatCompletion
from coordinator.frontend.http.responses.completion import Completion
from coordinator.frontend.http.responses.response_objects import (
    FunctionCallItem,
    OutputMessage,
    ReasoningItem,
    ResponsesResponse,
)
from coordinator.frontend.http.schema.body_decoder import RequestBody
from coordinator.frontend.http.schema.chat_messages import ChatMessageParam, ContentPart
from coordinator.frontend.http.schema.generation_requests import (
    TOP_K_OFF,
    TRUNCATE_TO_CONTEXT,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from coordinator.frontend.http.schema.responses_request import (
    InputItem,
    InputPart,
    ResponsesRequest,
    ResponsesStreamOptions,
    ResponsesToolChoiceParam,
    ResponsesToolParam,
    TextConfig,
    TextFormat,
)
from coordinator.frontend.http.schema.structured_output_fields import (
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from coordinator.frontend.http.schema.tokenize_request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from coordinator.frontend.http.schema.tools import (
    TOOL_NAME_PATTERN,
    FunctionCallParam,
    FunctionNameParam,
    FunctionParam,
    NamedToolChoiceParam,
    ToolCallParam,
    ToolParam,
)
from coordinator.frontend.http.schema.unsupported_fields import with_unsupported_fields
from coordinator.text.chat_template import MESSAGE_ROLES

Json = dict[str, Any]

_REQUESTS: tuple[type[RequestBody], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ChatMessageParam,
)
_RESPONSES = (
    Completion,
    ChatCompletion,
    ResponsesResponse,
    OutputMessage,
    ReasoningItem,
    FunctionCallItem,
    TokenizeResponse,
    DetokenizeResponse,
    ModelList,
    Health,
    Version,
    ErrorBody,
)
_WIRE_TYPES = {body: with_unsupported_fields(body) for body in _REQUESTS}
_PARTS: tuple[type[msgspec.Struct], ...] = (
    StreamOptions,
    ContentPart,
    ToolParam,
    FunctionParam,
    NamedToolChoiceParam,
    FunctionNameParam,
    ToolCallParam,
    FunctionCallParam,
    InputItem,
    InputPart,
    ResponsesStreamOptions,
    ResponsesToolChoiceParam,
    ResponsesToolParam,
    TextConfig,
    TextFormat,
    ResponseFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
_REQUEST_SCHEMA_NAMES = {kind.__name__ for kind in (*_REQUESTS, *_PARTS)}
_ROUTES = (
    ("/v1/completions", "The continuation of a prompt", CompletionRequest, Completion),
    ("/v1/chat/completions", "The next message of a conversation", ChatRequest, ChatCompletion),
    ("/v1/responses", "An answer, in OpenAI's newer format", ResponsesRequest, ResponsesResponse),
    ("/tokenize", "The tokens of a text or of a conversation", TokenizeRequest, TokenizeResponse),
    ("/detokenize", "The text of tokens", DetokenizeRequest, DetokenizeResponse),
)
_PAGES = (
    ("/v1/models", "What is served", ModelList),
    ("/v1/models/{model_id}", "One model, whose name may have slashes", ModelCard),
    ("/health", "Whether requests would be served", Health),
    ("/ping", "The same, also by POST, as SageMaker asks", Health),
    ("/version", "Of Baton", Version),
)
_PATH_PARAMETER = re.compile(r"{(\w+)}")
_TOKEN_IDS: Json = {"items": {"type": "integer", "minimum": 0}}
_BOUNDS: dict[str, Json] = {
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": limits.MAX_TEMPERATURE},
    "top_k": {"minimum": TOP_K_OFF},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
    "min_tokens": {"minimum": 0},
    "presence_penalty": {"minimum": -limits.MAX_PENALTY, "maximum": limits.MAX_PENALTY},
    "frequency_penalty": {"minimum": -limits.MAX_PENALTY, "maximum": limits.MAX_PENALTY},
    "repetition_penalty": {
        "minimum": limits.MIN_REPETITION_PENALTY,
        "maximum": limits.MAX_REPETITION_PENALTY,
    },
    "n": {"minimum": 1, "maximum": limits.MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": limits.MAX_CHOICES},
    "first_choice": {"minimum": 0, "maximum": limits.MAX_CHOICE_INDEX - limits.MAX_CHOICES},
    "top_logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": limits.MAX_LOGPROBS},
    "stop": {
        "minLength": 1,
        "maxLength": limits.MAX_STOP_STRING_CHARACTERS,
        "maxItems": limits.MAX_STOP_STRINGS,
        "items": {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_STRING_CHARACTERS},
    },
    "stop_token_ids": {"maxItems": limits.MAX_STOP_TOKEN_IDS, **_TOKEN_IDS},
    "tokens": _TOKEN_IDS,
    "messages": {"minItems": 1, "maxItems": limits.MAX_CHAT_MESSAGES},
    "logit_bias": {
        "maxProperties": limits.MAX_LOGIT_BIAS_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {
            "type": "number",
            "minimum": -limits.MAX_LOGIT_BIAS,
            "maximum": limits.MAX_LOGIT_BIAS,
        },
    },
    "chat_template_kwargs": {
        "maxProperties": limits.MAX_TEMPLATE_ARGUMENTS,
        "propertyNames": {
            "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,{limits.MAX_TEMPLATE_KEY_CHARACTERS - 1}}}$"
        },
        "additionalProperties": {
            "type": ["string", "number", "boolean", "null"],
            "maxLength": limits.MAX_TEMPLATE_STRING_CHARACTERS,
            "minimum": -limits.MAX_TEMPLATE_NUMBER,
            "maximum": limits.MAX_TEMPLATE_NUMBER,
        },
    },
    "truncate_prompt_tokens": {"minimum": TRUNCATE_TO_CONTEXT, "not": {"const": 0}},
    "tools": {"maxItems": limits.MAX_TOOLS},
    "tool_calls": {"maxItems": limits.MAX_TOOL_CALLS},
    "role": {"enum": list(MESSAGE_ROLES)},
    "content": {"type": ["string", "array", "null"]},
}
_PROMPT: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, **_TOKEN_IDS},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.MAX_PROMPTS,
            "items": {"type": "string"},
        },
        {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.MAX_PROMPTS,
            "items": {"type": "array", "minItems": 1, **_TOKEN_IDS},
        },
    ]
}
_REQUIRED: dict[type[RequestBody], list[Json]] = {
    CompletionRequest: [{"required": ["prompt"]}],
    ChatRequest: [{"required": ["messages"]}],
    TokenizeRequest: [{"required": ["prompt"]}, {"required": ["messages"]}],
    ResponsesRequest: [{"required": ["input"]}],
    DetokenizeRequest: [{"required": ["tokens"]}],
    ChatMessageParam: [{"required": ["role"]}],
}
_EVENT: Json = {
    "description": (
        "One event. Its data is a chunk or an error as JSON, and that of the last one [DONE]"
    ),
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_ERRORS = {
    400: "The request is wrong: the message names the field, the value and the bound",
    401: "A key is needed, or is not valid",
    403: "A web page of another origin calls where no key is asked for",
    404: "There is no such model",
    413: "The body is too large",
    415: "The body does not say that it is JSON",
    429: "The queue is full: try again after Retry-After",
    500: "A defect",
    503: "The cluster cannot serve it now: try again after Retry-After",
    504: "The deadline has passed",
}
_HEADERS = (
    (
        "x-request-timeout",
        {"type": "number", "exclusiveMinimum": 0},
        "Seconds that the client is willing to wait",
    ),
    (
        "x-request-id",
        {"type": "string", "minLength": 1, "maxLength": 128},
        "The client's own id, given back",
    ),
)


def build_openapi_document(version: str) -> Json:
    _, schemas = msgspec.json.schema_components(
        [*_WIRE_TYPES.values(), *_RESPONSES], ref_template="#/components/schemas/{name}"
    )
    for body in _REQUESTS:
        _apply_bounds(schemas[body.__name__], body)
    schemas[FunctionParam.__name__]["properties"]["name"]["pattern"] = f"^{TOOL_NAME_PATTERN}$"
    for kind in (ToolParam, ResponsesToolParam):
        schemas[kind.__name__]["properties"]["type"]["enum"] = ["function"]
    _describe_fields(schemas)
    paths: Json = {
        path: {"post": _post_operation(summary, takes, gives)}
        for path, summary, takes, gives in _ROUTES
    }
    paths |= {
        path: {"get": _get_operation(path, summary, gives)} for path, summary, gives in _PAGES
    }
    paths["/v1/embeddings"] = {
        "post": {"summary": "Refused: the model generates text", "responses": _error_responses()}
    }
    paths["/tokenizer_info"] = {
        "get": {
            "summary": "The tokenizer_config.json of the model, with its chat template",
            "responses": _with_answer({"type": "object"}, {}),
        }
    }
    paths["/ping"]["post"] = _get_operation("/ping", "The same", Health)
    bearer = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "--api-key, where one is set"}
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": bearer},
        "security": [{}, {"bearer": []}],
    }


def _describe_fields(schemas: Json) -> None:
    for name, schema in schemas.items():
        if "description" in schema:  # a docstring: its line breaks mean nothing
            schema["description"] = " ".join(schema["description"].split())
        table = REQUEST_FIELDS if name in _REQUEST_SCHEMA_NAMES else RESPONSE_FIELDS
        for field, shape in schema["properties"].items():
            if "description" not in shape:
                shape["description"] = describe_field(table, name, field)


def _apply_bounds(schema: Json, body: type[RequestBody]) -> None:
    properties = schema["properties"]
    for field, bounds in _BOUNDS.items():
        if field in properties:
            properties[field].update(bounds)
    for field, accepted in body.no_ops.items():
        properties[field] = {"enum": [None, *accepted], "description": NO_OP_DESCRIPTION}
    if body is ResponsesRequest:
        properties["store"]["enum"] = [None, False]
        properties["previous_response_id"] = {
            "type": "null",
            "description": REQUEST_FIELDS["previous_response_id"],
        }
    if body is ChatRequest:
        properties["tool_choice"] = {
            "anyOf": [
                {"enum": [None, "none", "auto", "required"]},
                _schema_ref(NamedToolChoiceParam),
            ],
            "description": REQUEST_FIELDS["tool_choice"],
        }
    if body is CompletionRequest:
        properties["prompt"] = dict(_PROMPT)
        properties["logprobs"].update({"minimum": 0, "maximum": limits.MAX_LOGPROBS})
    for alternative in _REQUIRED[body]:
        for field in alternative["required"]:
            properties[field].pop("default", None)
            properties[field]["not"] = {"type": "null"}
    schema["oneOf"] = _REQUIRED[body]
    schema.pop("required", None)


def _post_operation(summary: str, takes: type[RequestBody], gives: type[msgspec.Struct]) -> Json:
    streams = (
        {"text/event-stream": {"schema": _EVENT}}
        if gives in (Completion, ChatCompletion, ResponsesResponse)
        else {}
    )
    return {
        "summary": summary,
        "parameters": [
            {
                "name": name,
                "in": "header",
                "required": False,
                "schema": schema,
                "description": description,
            }
            for name, schema, description in _HEADERS
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _schema_ref(takes)}},
        },
        "responses": _response_schemas(gives, streams),
    }


def _get_operation(path: str, summary: str, gives: type[msgspec.Struct]) -> Json:
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(path)
    ]
    return {"summary": summary, "responses": _response_schemas(gives, {})} | (
        {"parameters": parameters} if parameters else {}
    )


def _response_schemas(gives: type[msgspec.Struct], streams: Json) -> Json:
    return _with_answer(_schema_ref(gives), streams)


def _with_answer(schema: Json, streams: Json) -> Json:
    content = {"application/json": {"schema": schema}, **streams}
    return {"200": {"description": "The answer", "content": content}, **_error_responses()}


def _error_responses() -> Json:
    return {
        str(status): {
            "description": description,
            "content": {"application/json": {"schema": _schema_ref(ErrorBody)}},
        }
        for status, description in _ERRORS.items()
    }


def _schema_ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
