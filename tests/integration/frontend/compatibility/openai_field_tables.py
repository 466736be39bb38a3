"""The fields of OpenAI's two request schemas: what is honoured, accepted or refused of each."""

from dataclasses import dataclass
from typing import Any

from baton.types import GrammarKind, Request, StructuredOutput

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GOOD_BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [1], "max_tokens": 4},
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}


@dataclass(frozen=True)
class FieldCase:
    """`honoured_value`: a value, and the field of the request or response that shows it.
    `accepted_values` asks for nothing. `refused_values` is not served. `accepts_null`: may the
    field be null, as one that is not there?"""

    honoured_value: tuple[object, str, object] | None = None
    accepted_values: tuple[object, ...] = ()
    refused_values: tuple[object, ...] = ()
    accepts_null: bool = True


JSON_OBJECT = StructuredOutput(GrammarKind.JSON, '{"type":"object"}')
COMMON_FIELDS: dict[str, FieldCase] = {
    "model": FieldCase(("demo", "told.model", "demo")),
    "frequency_penalty": FieldCase((0.5, "sampling.frequency_penalty", 0.5), (0, 0.0), (2.5, "0")),
    "presence_penalty": FieldCase((-0.5, "sampling.presence_penalty", -0.5), (0,), (-2.5,)),
    "logit_bias": FieldCase(
        ({"5": -3}, "sampling.logit_bias", ((5, -3.0),)), ({},), ({"5": 101}, {"x": 1}, {"5000": 1})
    ),
    "max_tokens": FieldCase((3, "sampling.max_tokens", 3), (), (-1,)),
    "n": FieldCase((2, "choices", 2), (1,), (0, 17)),
    "seed": FieldCase(
        (-(2**63), "sampling.seed", -(2**63)), (2**63 - 1,), (2**63, -(2**63) - 1, 0.5)
    ),
    "stop": FieldCase(
        (["\n"], "told.choices.0.finish_reason", "length"), ([],), ("", ["x"] * 17, 5)
    ),
    "stream": FieldCase(None, (False,), ("yes",)),
    "stream_options": FieldCase(None, (), ({"include_usage": True}, {"x": 1}, 5)),
    "temperature": FieldCase((0.5, "sampling.temperature", 0.5), (), (2.5, -1)),
    "top_p": FieldCase((0.5, "sampling.top_p", 0.5), (1,), (0, 1.5)),
    "user": FieldCase(None, ("me",), (5,)),
}
COMPLETION_FIELDS: dict[str, FieldCase] = COMMON_FIELDS | {
    "prompt": FieldCase(
        ([3, 4], "prompt_token_ids", (3, 4)), (), (5, [1, "a"], None), accepts_null=False
    ),
    "best_of": FieldCase(None, (1,), (2,)),
    "echo": FieldCase((True, "told.choices.0.text", "!"), (False,), (1,)),
    "logprobs": FieldCase((2, "sampling.logprobs", 2), (), (21, True)),
    "suffix": FieldCase(None, (), ("x", "")),
}
CHAT_FIELDS: dict[str, FieldCase] = COMMON_FIELDS | {
    "messages": FieldCase(None, (), ([], 5), accepts_null=False),
    "audio": FieldCase(None, (), ({"voice": "x", "format": "wav"},)),
    "function_call": FieldCase(None, ("none", "auto"), ({"name": "f"},)),
    "functions": FieldCase(None, ([],), ([{"name": "f"}],)),
    "logprobs": FieldCase((True, "sampling.logprobs", 0), (False,), (1,)),
    "max_completion_tokens": FieldCase(None, (4,), (0, 5)),  # beside max_tokens
    "metadata": FieldCase(None, ({}, {"a": "b"}), ({"a": 1}, "x")),
    "modalities": FieldCase(None, (["text"],), (["text", "audio"],)),
    "moderation": FieldCase(None, (), ({"model": "x"},)),
    "parallel_tool_calls": FieldCase(None, (True, False), (1,)),
    "prediction": FieldCase(None, (), ({"type": "content", "content": "x"},)),
    "prompt_cache_key": FieldCase(None, ("k",), (5,)),
    "prompt_cache_options": FieldCase(None, ({},), ({"x": 1},)),
    "prompt_cache_retention": FieldCase(None, ("in_memory",), ("24h",)),
    "reasoning_effort": FieldCase(None, ("none",), ("low", "medium")),
    "response_format": FieldCase(
        ({"type": "json_object"}, "sampling.structured_output", JSON_OBJECT),
        ({"type": "text"},),
        ("text", {"type": "x"}, {"type": "json_schema"}, {"type": "structural_tag"}, {}),
    ),
    "safety_identifier": FieldCase(None, ("x",), (5,)),
    "service_tier": FieldCase(None, ("auto", "default"), ("flex", "priority")),
    "store": FieldCase(None, (False,), (True, 0)),
    "tool_choice": FieldCase(
        None, ("none", "auto"), ("required", {"type": "function", "function": {"name": "f"}})
    ),
    "tools": FieldCase(None, ([],), ([{"type": "function", "function": {"name": "f"}}],)),
    "top_logprobs": FieldCase(None, (0,), (2, 21)),  # without logprobs
    "verbosity": FieldCase(None, ("medium",), ("low",)),
    "web_search_options": FieldCase(None, (), ({},)),
}
FIELD_TABLES = {"completions": COMPLETION_FIELDS, "chat": CHAT_FIELDS}


def sampled_requests(requests: list[Request]) -> tuple[object, ...]:
    return tuple(
        (request.prompt_token_ids, request.sampling, request.choice_index) for request in requests
    )
