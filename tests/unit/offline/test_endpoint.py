"""The client of an endpoint: what it sends again, how long, and what it reports."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    RequestRejected,
    Unauthenticated,
)
from baton.process.clock import FakeClock
from offline.endpoint import Endpoint, EndpointAnswer, EndpointUnavailable

Handler = Callable[[httpx2.Request], httpx2.Response]


def make_endpoint(handler: Handler, **options: Any) -> Endpoint:
    defaults: dict[str, Any] = {
        "max_in_flight": 8,
        "answer_seconds": 5.0,
        "retry_seconds": 60.0,
        "clock": FakeClock(),
    }
    transport = httpx2.MockTransport(handler)
    return Endpoint("http://cluster/v1", transport=transport, **{**defaults, **options})


def refusal(status: int, code: str, message: str = "busy") -> httpx2.Response:
    error = {"message": message, "code": code, "param": None}
    return httpx2.Response(status, json={"error": error}, headers={"retry-after": "0"})


def replies(*answers: httpx2.Response | Exception) -> tuple[Handler, list[httpx2.Request]]:
    """A handler that gives these answers in turn, and the requests that it has got."""
    left, seen = list(answers), list[httpx2.Request]()

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle, seen


async def post(endpoint: Endpoint) -> EndpointAnswer:
    try:
        return await endpoint.post("/v1/completions", b'{"prompt": [1]}')
    finally:
        await endpoint.close()


OK = httpx2.Response(200, json={"choices": []}, headers={"x-baton-request-id": "abc"})


@pytest.mark.parametrize(
    "first",
    [
        refusal(429, "overloaded"),
        refusal(503, "unavailable"),
        refusal(503, "draining"),
        refusal(429, "rate_limit_exceeded"),  # of OpenAI
        httpx2.Response(  # of vLLM
            503, json={"error": {"message": "x", "code": 503}}, headers={"retry-after": "0"}
        ),
        httpx2.Response(502, text="bad gateway", headers={"retry-after": "0"}),
    ],
)
async def test_what_a_busy_cluster_refuses_is_sent_again(first: httpx2.Response) -> None:
    handler, seen = replies(first, first, first, first, OK)
    answer = await post(make_endpoint(handler, api_key="key"))
    assert (answer.status, answer.request_id, answer.error) == (200, "abc", None)
    assert len(seen) == 5
    assert {request.url.path for request in seen} == {"/v1/completions"}
    assert {request.headers["authorization"] for request in seen} == {"Bearer key"}
    assert {request.content for request in seen} == {b'{"prompt": [1]}'}


async def test_a_broken_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline.endpoint._FIRST_PAUSE", 0.0)
    handler, seen = replies(httpx2.ConnectError("refused"), httpx2.ReadError("reset"), OK)
    assert (await post(make_endpoint(handler))).status == 200
    assert len(seen) == 3


@pytest.mark.parametrize("code", ["node_failed", "out_of_memory", "incomplete"])
async def test_a_request_that_makes_nodes_fail_is_not_tried_for_long(code: str) -> None:
    handler, seen = replies(*[refusal(503, code, "a node failed")] * 9)
    answer = await post(make_endpoint(handler))
    assert answer.status == 503
    assert str(answer.error) == "a node failed"
    assert len(seen) == 3


async def test_tries_end_after_the_retry_timeout() -> None:
    clock = FakeClock()

    def refuse(request: httpx2.Request) -> httpx2.Response:
        clock.advance(25.0)
        return refusal(429, "overloaded", "the queue is full")

    with pytest.raises(EndpointUnavailable) as caught:
        await post(make_endpoint(refuse, clock=clock))
    assert str(caught.value) == (
        "http://cluster/v1 cannot be used: it answers 429 (the queue is full), tried for 60 s"
    )
    assert clock() == 100.0  # at 25, 50, 75 and 100 s: the 60 s begin with the first refusal


async def test_after_one_request_is_given_up_those_that_wait_are_sent_once() -> None:
    clock, seen = FakeClock(), 0

    def refuse(request: httpx2.Request) -> httpx2.Response:
        nonlocal seen
        seen += 1
        clock.advance(31.0)
        return refusal(503, "unavailable")

    endpoint = make_endpoint(refuse, clock=clock, max_in_flight=1)
    sent = [endpoint.post("/v1/completions", b"{}") for _ in range(5)]
    errors = await asyncio.gather(*sent, return_exceptions=True)
    await endpoint.close()
    assert [type(error) for error in errors] == [EndpointUnavailable] * 5
    assert seen == 3 + 4  # the first one at 31, 62 and 93 s


async def test_a_request_after_one_that_was_given_up_is_tried_as_long() -> None:
    """A cluster that was away for one call of an LLM may be starting again at the next one."""
    busy, clock = [refusal(503, "unavailable")] * 2, FakeClock()
    handler, _ = replies(*busy, OK)
    endpoint = make_endpoint(handler, clock=clock, retry_seconds=-1.0)
    with pytest.raises(EndpointUnavailable):
        await endpoint.post("/v1/completions", b"{}")
    endpoint._retry_seconds = 60.0
    assert (await endpoint.post("/v1/completions", b"{}")).status == 200
    await endpoint.close()


async def test_a_request_that_takes_too_long_has_an_error_of_its_own() -> None:
    handler, _ = replies(httpx2.ReadTimeout("slow"))
    with pytest.raises(DeadlineExceeded, match=r"gave no answer within 5 s \(timeout\)"):
        await post(make_endpoint(handler))


async def test_errors_of_a_request_are_answers() -> None:
    error = {"message": "n is 99", "code": "invalid_request", "param": "n"}
    handler, _ = replies(httpx2.Response(400, json={"error": error}))
    answer = await post(make_endpoint(handler))
    assert answer.error is not None
    assert (answer.error.message, answer.error.param) == ("n is 99", "n")


async def test_an_answer_that_is_no_json_is_quoted() -> None:
    handler, _ = replies(httpx2.Response(500, text="<h1>oops</h1>"))
    answer = await post(make_endpoint(handler))
    assert isinstance(answer.error, RequestRejected)
    assert str(answer.error) == "the endpoint answered 500: <h1>oops</h1>"


async def test_at_most_so_many_requests_are_in_flight() -> None:
    running, most = 0, 0

    async def handle(request: httpx2.Request) -> httpx2.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return OK

    endpoint = make_endpoint(handle, max_in_flight=3)  # type: ignore[arg-type]
    await asyncio.gather(*(endpoint.post("/v1/completions", b"{}") for _ in range(20)))
    await endpoint.close()
    assert most == 3


async def test_checking_finds_who_does_not_answer_and_who_refuses() -> None:
    busy, foreign = refusal(503, "unavailable"), refusal(401, "invalid_api_key")
    handler, _ = replies(httpx2.ConnectError("connection refused"), foreign, busy)
    endpoint = make_endpoint(handler)
    with pytest.raises(EndpointUnavailable, match="cannot be used: connection refused"):
        await endpoint.check()
    with pytest.raises(Unauthenticated):
        await endpoint.check()
    await endpoint.check()
    await endpoint.close()


async def test_checking_does_not_wait_as_long_as_for_an_answer() -> None:
    limits: list[dict[str, float]] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        limits.append(request.extensions["timeout"])
        return OK

    endpoint = make_endpoint(handle, answer_seconds=3600.0)
    await endpoint.check()
    await post(endpoint)
    assert [limit["read"] for limit in limits] == [30.0, 3600.0]
    assert {limit["connect"] for limit in limits} == {10.0}


@pytest.mark.parametrize("body", [{}, {"data": []}, {"data": [{"id": "m"}]}, "no"])
async def test_a_model_whose_context_is_unknown_is_an_error(body: Any) -> None:
    endpoint = make_endpoint(lambda request: httpx2.Response(200, json=body))
    with pytest.raises(BatonError, match="does not say how long its model's context is"):
        await endpoint.fetch_max_model_len()
    await endpoint.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
async def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an http:// or https:// URL"):
        Endpoint(url, max_in_flight=1, answer_seconds=1.0, retry_seconds=1.0)
