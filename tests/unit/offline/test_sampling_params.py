"""SamplingParams of the Python API, and the bodies that they become."""

import dataclasses
from typing import Any

import pytest

from baton import types
from baton.errors import InvalidRequest
from coordinator.frontend.http.schema.generation_requests import CommonRequestBody
from offline.request_bodies import build_chat, build_completion, list_conversations
from offline.sampling_params import SamplingParams


def test_every_parameter_of_a_request_can_be_given() -> None:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    fields = {field.name for field in dataclasses.fields(types.SamplingParams)}
    assert fields - {"structured_output"} <= known
    assert "structured_outputs" in known  # the form in which it is given over HTTP, too


def test_fields_of_the_body_are_those_of_the_http_api() -> None:
    everything: dict[str, Any] = {
        "seed": 1,
        "stop": ["a"],
        "stop_token_ids": [3],
        "logit_bias": {7: -1.5},
        "logprobs": 2,
        "prompt_logprobs": 3,
        "structured_outputs": {"choice": ["a", "b"]},
    }
    body = SamplingParams(**everything).to_body()
    assert body.keys() <= set(CommonRequestBody.__struct_fields__)
    assert body["logit_bias"] == {"7": -1.5}
    assert "logprobs" not in body
    assert SamplingParams(max_tokens=None).to_body().keys() >= {"n", "temperature", "top_p"}
    assert "max_tokens" not in SamplingParams(max_tokens=None).to_body()


def test_logprobs_are_asked_for_as_each_route_does() -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=5, extra_body={"temperature": 0.5})
    body = build_completion(0, "text", params).body
    assert (body["logprobs"], body["prompt_logprobs"], body["temperature"]) == (2, 5, 0.5)
    messages = [{"role": "user", "content": "x"}]
    body = build_chat(0, messages, SamplingParams(logprobs=0), {"tools": []}).body
    assert (body["logprobs"], body["top_logprobs"], body["tools"]) == (True, 0, [])
    body = build_chat(0, messages, params, {}).body
    assert (body["top_logprobs"], body["prompt_logprobs"]) == (2, 5)


def test_without_parameters_the_model_decides() -> None:
    assert build_completion(0, [1, 2], None).body == {"prompt": [1, 2], "return_token_ids": True}


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        ("text", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (7, "messages is a int"),
        ([[{"role": "user"}], "text"], "messages[1] is 'text'"),
        ([{"role": "user"}, [{"role": "user"}]], "messages[0] is {'role': 'user'}"),
    ],
)
def test_conversations_of_the_wrong_form_are_named(messages: Any, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _build_chats(messages)
    assert str(caught.value).startswith(f"{name}: it must be a list of")


def _build_chats(messages: Any) -> None:
    for index, each in enumerate(list_conversations(messages)):
        build_chat(index, each, None, {})
