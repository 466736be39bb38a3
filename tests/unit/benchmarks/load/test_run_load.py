"""The load generator against a small endpoint that can be told how to behave."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.load.completions_client import CompletionsClient
from benchmarks.load.http_stream import HttpError, open_request, parse_url
from benchmarks.load.request_plan import (
    ClosedLoop,
    LengthDistribution,
    PlannedRequest,
    PoissonArrivals,
    plan_requests,
)
from benchmarks.load.run_load import UNFINISHED_ERROR, run_load

OK = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Any]


def chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


async def stream(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """A good answer, with events cut where no line ends."""
    writer.write((OK + "Transfer-Encoding: chunked\r\n\r\n").encode())
    text = "".join(
        event(choices=[{"text": "t", "token_ids": [n] if body.get("return_token_ids") else None}])
        for n in range(body["max_tokens"])
    )
    text += event(choices=[], usage={"completion_tokens": body["max_tokens"]}) + "data: [DONE]\n\n"
    for start in range(0, len(text), 37):
        writer.write(chunk(text[start : start + 37]))
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


def refuse(field_name: str, then: Reply) -> Reply:
    """A 400 in OpenAI's shape for requests that carry the field."""

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        wrong = (
            isinstance(body.get("prompt"), list) if field_name == "prompt" else field_name in body
        )
        if not wrong:
            await then(body, writer)
            return
        error = json.dumps({"error": {"message": "no", "param": field_name}})
        writer.write(f"HTTP/1.1 400 Bad\r\nContent-Length: {len(error)}\r\n\r\n{error}".encode())

    return reply


@dataclass
class FakeCompletionsEndpoint:
    reply: Reply = stream
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    client: CompletionsClient = field(init=False)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
            self.heads.append(head)
            self.bodies.append(json.loads(await reader.readexactly(length)))
            await self.reply(self.bodies[-1], writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeCompletionsEndpoint]:
    endpoint = FakeCompletionsEndpoint()
    listening = await asyncio.start_server(endpoint.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    endpoint.client = CompletionsClient(
        parse_url(f"http://127.0.0.1:{port}/v1"), "m", "sesame", 300, timeout_seconds=5.0
    )
    async with listening:
        yield endpoint


async def test_tokens_are_counted_as_they_arrive(endpoint: FakeCompletionsEndpoint) -> None:
    seen = await endpoint.client.measure_request(PlannedRequest(0.0, 5, 9, seed=4), due=0.0)
    assert (seen.error, seen.received_tokens, seen.usage_tokens) == ("", 9, 9)
    assert [moment for moment, _ in seen.token_arrivals] == sorted(
        moment for moment, _ in seen.token_arrivals
    )
    [body] = endpoint.bodies
    assert (len(body["prompt"]), body["max_tokens"], body["model"], body["stream"]) == (
        5,
        9,
        "m",
        True,
    )
    assert endpoint.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer sesame\r\n" in endpoint.heads[0]


async def test_requests_are_greedy_unless_the_client_samples(
    endpoint: FakeCompletionsEndpoint,
) -> None:
    sampling = replace(endpoint.client, temperature=1.0, top_p=0.9)
    for client in (endpoint.client, sampling):
        await client.measure_request(PlannedRequest(0.0, 5, 2, seed=4), due=0.0)
    greedy, sampled = endpoint.bodies
    assert (greedy["temperature"], "top_p" in greedy) == (0.0, False)
    assert (sampled["temperature"], sampled["top_p"]) == (1.0, 0.9)


async def test_probe_gives_up_what_the_endpoint_refuses_and_nothing_else(
    endpoint: FakeCompletionsEndpoint,
) -> None:
    endpoint.reply = refuse("return_token_ids", refuse("prompt", stream))
    client = await endpoint.client.probe_features()
    dialect = client.features
    assert (dialect.return_token_ids, dialect.token_prompts) == (False, False)
    assert (dialect.ignore_eos, dialect.include_usage) == (True, True)
    seen = await client.measure_request(PlannedRequest(0.0, 5, 4, seed=4), due=0.0)
    assert (seen.error, seen.received_tokens) == ("", 4)
    assert len(endpoint.bodies[-1]["prompt"].split()) == 5


async def test_messages_count_where_token_ids_are_ignored(
    endpoint: FakeCompletionsEndpoint,
) -> None:
    async def ignore(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await stream(body | {"return_token_ids": False}, writer)

    endpoint.reply = ignore
    client = await endpoint.client.probe_features()
    assert not client.features.return_token_ids
    seen = await client.measure_request(PlannedRequest(0.0, 5, 4, seed=4), due=0.0)
    assert (seen.error, seen.received_tokens) == ("", 4)


async def test_probe_tells_what_it_cannot_work_around(endpoint: FakeCompletionsEndpoint) -> None:
    endpoint.reply = refuse("model", stream)
    with pytest.raises(ValueError, match=r"answers 400: .*model"):
        await endpoint.client.probe_features()


async def broken_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(
        (OK + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk(event(choices=[{"text": "t"}]))
    )


async def no_done(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write((OK + "\r\n").encode() + event(choices=[{"text": "t", "token_ids": [1]}]).encode())


async def error_event(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(
        (OK + "\r\n").encode() + event(error={"message": "gone"}).encode() + b"data: [DONE]\n\n"
    )


async def overloaded(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n")


async def gibberish(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")


async def not_json(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write((OK + "\r\ndata: {oops\n\n").encode())


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (broken_off, "HttpError"),
        (no_done, "no [DONE]"),
        (error_event, "error event"),
        (overloaded, "http 429"),
        (gibberish, "HttpError"),
        (not_json, "DecodeError"),
    ],
)
async def test_every_bad_end_is_an_error_of_its_kind(
    endpoint: FakeCompletionsEndpoint, reply: Reply, error: str
) -> None:
    endpoint.reply = reply
    seen = await endpoint.client.measure_request(PlannedRequest(0.0, 5, 4, seed=4), due=0.0)
    assert seen.error == error


async def test_unreachable_endpoint_is_an_error(endpoint: FakeCompletionsEndpoint) -> None:
    client = CompletionsClient(parse_url("http://127.0.0.1:1"), "", "", 300, timeout_seconds=5.0)
    assert (
        await client.measure_request(PlannedRequest(0.0, 5, 4, seed=4), due=0.0)
    ).error == "ConnectionRefusedError"


async def test_a_closed_loop_keeps_its_concurrency_and_sends_the_whole_plan(
    endpoint: FakeCompletionsEndpoint,
) -> None:
    requests = plan_requests(
        ClosedLoop(3), LengthDistribution("uniform", 1, 9), LengthDistribution("fixed", 4), 20, "s"
    )
    seen = await run_load(endpoint.client, ClosedLoop(3), requests, seconds=30.0)
    assert len(seen) == 20
    assert {measurement.error for measurement in seen} == {""}
    assert endpoint.most_open == 3
    assert len({tuple(body["prompt"]) for body in endpoint.bodies if len(body["prompt"]) > 2}) > 10


async def test_poisson_arrivals_do_not_wait_for_answers(endpoint: FakeCompletionsEndpoint) -> None:
    release = asyncio.Event()

    async def held(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(endpoint.bodies) == 8:  # the last has arrived while all others were held
            release.set()
        await release.wait()
        await stream(body, writer)

    endpoint.reply = held
    load = PoissonArrivals(500.0)
    seen = await run_load(
        endpoint.client,
        load,
        plan_requests(load, LengthDistribution("fixed", 4), LengthDistribution("fixed", 2), 8, "s"),
        30.0,
    )
    assert endpoint.most_open == 8
    assert [measurement.error for measurement in seen] == [""] * 8


async def test_what_runs_when_the_time_is_up_is_counted_as_unfinished(
    endpoint: FakeCompletionsEndpoint,
) -> None:
    async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await over.wait()

    over = asyncio.Event()
    endpoint.reply = never
    requests = plan_requests(
        ClosedLoop(2), LengthDistribution("fixed", 4), LengthDistribution("fixed", 2), 50, "s"
    )
    seen = await run_load(endpoint.client, ClosedLoop(2), requests, seconds=0.2)
    assert [measurement.error for measurement in seen] == [UNFINISHED_ERROR] * 2
    over.set()  # newer Pythons close a listener when its connections have been served


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://"])
def test_urls_that_are_none_are_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        parse_url(url)


async def test_a_body_beyond_its_bound_is_refused(endpoint: FakeCompletionsEndpoint) -> None:
    async def endless(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write((OK + "Content-Length: 4096\r\n\r\n").encode() + b"x" * 4096)

    endpoint.reply = endless
    async with open_request(endpoint.client.target, "POST", "/", {}, b"{}") as response:
        with pytest.raises(HttpError, match="longer than 1024"):
            await response.read_body(1024)
