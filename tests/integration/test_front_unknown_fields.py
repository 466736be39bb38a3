"""--unknown-fields: what no schema has is refused by name, or dropped at any depth and counted, over both doors."""

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.pb import generation_pb2 as pb
from coordinator import unknown_fields
from coordinator.unknown_fields import UnknownFields
from tests.integration.front_fixtures import grpc_error, serving
from tests.integration.front_text import chatting_tokenizer

NAMED = {"role": "user", "content": "a", "id": 7}
TEXT = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "top": ("/v1/completions", {"prompt": [1], "colour": "red", "taste": {"of": ["salt"]}}, 2),
    "stream options": (
        "/v1/completions",
        {"prompt": [1], "stream": True, "stream_options": {"include_usage": True, "x": 1}},
        1,
    ),
    "messages": ("/v1/chat/completions", {"messages": [NAMED, NAMED], "max_tokens": 4}, 2),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "top": 1}, 2),
    "tokenize": ("/tokenize", {"prompt": "hello", "colour": "red"}, 1),
    "detokenize": ("/detokenize", {"tokens": [1], "colour": "red"}, 1),
}


def counted(policy: UnknownFields) -> float | None:
    registry = CollectorRegistry()
    registry.register(policy)
    return registry.get_sample_value("baton_ignored_fields_total")


@pytest.mark.parametrize("name", list(BODIES))
async def test_dropped_and_counted(name: str) -> None:
    path, body, dropped = BODIES[name]
    policy = UnknownFields(ignored=True)
    async with serving(text=chatting_tokenizer(), unknown_fields=policy) as front:
        response = await front.http.post(path, json=body)
        assert (response.status_code, counted(policy)) == (200, dropped), response.text
    async with serving(text=chatting_tokenizer()) as front:
        response = await front.http.post(path, json=body)
        assert (response.status_code, "is not a field of this request" in response.text) == (400, True)


async def test_what_is_known_is_as_strict_as_ever() -> None:
    policy = UnknownFields(ignored=True)
    async with serving(unknown_fields=policy) as front:
        bad: list[tuple[bytes, str]] = [
            (b'{"prompt": [1], "x": 1, "temperature": "hot"}', "temperature"),
            (b'{"prompt": [1], "x": 1, "use_beam_search": true}', "use_beam_search"),
            (b'{"prompt": [1], "x": 1, "x": 2}', "x"),
            (b'{"prompt": [1], "x": 1, "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ]
        for body, field in bad:
            response = await front.http.post("/v1/completions", content=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert front.brain.submissions == []
        unfinished = await front.http.post("/v1/completions", content=b'{"prompt": [1], "x": 1')
        assert unfinished.status_code == 400
        logit_bias = {"prompt": [1], "x": 1, "logit_bias": {"5": -3}}  # a table of the client's own keys
        assert (await front.http.post("/v1/completions", json=logit_bias)).status_code == 200
        assert front.brain.submissions[0].sampling.logit_bias == ((5, -3.0),)


async def test_grpc_has_the_same_policy() -> None:
    unknown = b"\xc8\x3e\x01"  # field 1001, a number
    wire = pb.GenerateRequest(token_ids={"ids": [1]}).SerializeToString() + unknown
    request = pb.GenerateRequest.FromString(wire)
    policy = UnknownFields(ignored=True)
    async with serving(unknown_fields=policy) as front:
        assert (await front.stub.GenerateOnce(request)).usage.prompt_tokens == 1
        assert counted(policy) == 1
    async with serving() as front:
        error = await grpc_error(front.stub.GenerateOnce(request))
        assert "field number 1001" in str(error.details())


def test_one_line_at_most_a_minute_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = type("Log", (), {"warning": staticmethod(lambda event, **more: lines.append(event + json.dumps(more)))})
    monkeypatch.setattr(unknown_fields, "_log", log)
    now = 0.0
    policy = UnknownFields(ignored=True, clock=lambda: now)
    for _ in range(100):
        policy.count_dropped(3)
    assert [line.endswith('{"fields": 3}') for line in lines] == [True]
    now += unknown_fields.LOG_SECONDS
    policy.count_dropped(1)
    assert [line.endswith('{"fields": 298}') for line in lines] == [False, True]
    assert counted(policy) == 301
