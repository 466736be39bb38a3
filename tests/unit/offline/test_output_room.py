"""The rest of the context as `max_tokens` of a completion."""

import json

import httpx2
import pytest

from baton.errors import BatonError
from offline.output_room import fill_max_tokens
from offline.request_bodies import Prompt, build_chat, build_completion
from offline.sampling_params import SamplingParams
from tests.unit.offline.test_endpoint import make_endpoint

NO_BOUND = SamplingParams(max_tokens=None)


def count_tokens(request: httpx2.Request) -> httpx2.Response:
    if request.url.path == "/v1/models":
        return httpx2.Response(200, json={"data": [{"id": "m", "max_model_len": 100}]})
    assert request.url.path == "/tokenize"
    prompt = json.loads(request.content)["prompt"]
    return httpx2.Response(200, json={"count": len(prompt), "max_model_len": 100})


async def max_tokens_of(prompt: Prompt, params: SamplingParams | None) -> object:
    request = build_completion(0, prompt, params)
    return (await fill_max_tokens(make_endpoint(count_tokens), request)).body.get("max_tokens")


@pytest.mark.parametrize(
    ("prompt", "expected"), [("abcd", 96), ([1, 2, 3], 97), ([1] * 100, 1), ("a" * 200, 1)]
)
async def test_no_bound_is_the_rest_of_the_context(prompt: Prompt, expected: int) -> None:
    assert await max_tokens_of(prompt, NO_BOUND) == expected


async def test_other_requests_stay_as_they_are() -> None:
    assert await max_tokens_of("abcd", None) is None
    assert await max_tokens_of("abcd", SamplingParams(max_tokens=7)) == 7
    own = SamplingParams(max_tokens=None, extra_body={"max_tokens": 9})
    assert await max_tokens_of("abcd", own) == 9
    talk = build_chat(0, [{"role": "user", "content": "x"}], NO_BOUND, {})
    assert await fill_max_tokens(make_endpoint(count_tokens), talk) is talk


async def test_an_endpoint_that_counts_no_tokens_is_an_error() -> None:
    endpoint = make_endpoint(lambda request: httpx2.Response(404, json={}))
    with pytest.raises(BatonError, match="the endpoint answered 404"):
        await fill_max_tokens(endpoint, build_completion(0, "abcd", NO_BOUND))
    endpoint = make_endpoint(lambda request: httpx2.Response(200, json={}))
    with pytest.raises(BatonError, match="does not count tokens: give max_tokens"):
        await fill_max_tokens(endpoint, build_completion(0, "abcd", NO_BOUND))
