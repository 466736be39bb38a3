"""--unknown-fields: what no schema has is refused by name, or dropped at any depth and counted,
over both doors."""

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.pb import generation_pb2 as pb
from coordinator.frontend import unknown_fields
from coordinator.frontend.unknown_fields import UnknownFieldPolicy
from tests.integration.frontend.frontend_harness import await_grpc_error, running_frontend
from tests.small_tokenizers import chat_tokenizer

NAMED_MESSAGE = {"role": "user", "content": "a", "id": 7}
TEXT = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "top": ("/v1/completions", {"prompt": [1], "colour": "red", "taste": {"of": ["salt"]}}, 2),
    "stream options": (
        "/v1/completions",
        {"prompt": [1], "stream": True, "stream_options": {"include_usage": True, "x": 1}},
        1,
    ),
    "messages": (
        "/v1/chat/completions",
        {"messages": [NAMED_MESSAGE, NAMED_MESSAGE], "max_tokens": 4},
        2,
    ),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "top": 1},
        2,
    ),
    "tokenize": ("/tokenize", {"prompt": "hello", "colour": "red"}, 1),
    "detokenize": ("/detokenize", {"tokens": [1], "colour": "red"}, 1),
}


def read_dropped_count(policy: UnknownFieldPolicy) -> float | None:
    registry = CollectorRegistry()
    registry.register(policy)
    return registry.get_sample_value("baton_ignored_fields_total")


@pytest.mark.parametrize("name", list(BODIES))
async def test_unknown_fields_are_dropped_and_counted(name: str) -> None:
    path, body, dropped = BODIES[name]
    policy = UnknownFieldPolicy(ignored=True)
    async with running_frontend(text=chat_tokenizer(), unknown_fields=policy) as front:
        response = await front.http.post(path, json=body)
        assert (response.status_code, read_dropped_count(policy)) == (200, dropped), response.text
    async with running_frontend(text=chat_tokenizer()) as front:
        response = await front.http.post(path, json=body)
        assert (response.status_code, "is not a field of this request" in response.text) == (
            400,
            True,
        )


async def test_known_fields_are_still_checked() -> None:
    policy = UnknownFieldPolicy(ignored=True)
    async with running_frontend(unknown_fields=policy) as front:
        bad: list[tuple[bytes, str]] = [
            (b'{"prompt": [1], "x": 1, "temperature": "hot"}', "temperature"),
            (b'{"prompt": [1], "x": 1, "use_beam_search": true}', "use_beam_search"),
            (b'{"prompt": [1], "x": 1, "x": 2}', "x"),
            (b'{"prompt": [1], "x": 1, "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ]
        for body, field in bad:
            response = await front.http.post("/v1/completions", content=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert front.backend.requests == []
        unfinished = await front.http.post("/v1/completions", content=b'{"prompt": [1], "x": 1')
        assert unfinished.status_code == 400
        logit_bias = {
            "prompt": [1],
            "x": 1,
            "logit_bias": {"5": -3},
        }  # a table of the client's own keys
        assert (await front.http.post("/v1/completions", json=logit_bias)).status_code == 200
        assert front.backend.requests[0].sampling.logit_bias == ((5, -3.0),)


async def test_grpc_has_the_same_policy() -> None:
    unknown = b"\xc8\x3e\x01"  # field 1001, a number
    wire = pb.GenerateRequest(token_ids={"ids": [1]}).SerializeToString() + unknown
    request = pb.GenerateRequest.FromString(wire)
    policy = UnknownFieldPolicy(ignored=True)
    async with running_frontend(unknown_fields=policy) as front:
        assert (await front.stub.GenerateOnce(request)).usage.prompt_tokens == 1
        assert read_dropped_count(policy) == 1
    async with running_frontend() as front:
        error = await await_grpc_error(front.stub.GenerateOnce(request))
        assert "field number 1001" in str(error.details())


def test_dropped_fields_are_logged_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    log = type(
        "Log",
        (),
        {"warning": staticmethod(lambda event, **more: lines.append(event + json.dumps(more)))},
    )
    monkeypatch.setattr(unknown_fields, "_log", log)
    now = 0.0
    policy = UnknownFieldPolicy(ignored=True, clock=lambda: now)
    for _ in range(100):
        policy.count_dropped(3)
    assert [line.endswith('{"fields": 3}') for line in lines] == [True]
    now += unknown_fields.LOG_INTERVAL_SECONDS
    policy.count_dropped(1)
    assert [line.endswith('{"fields": 298}') for line in lines] == [False, True]
    assert read_dropped_count(policy) == 301
