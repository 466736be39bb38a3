"""Clients of a real cluster, through every door, that write down what they see (tests/history.py)."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton import wire
from baton.errors import BY_CODE, BatonError
from baton.pb import generation_pb2_grpc
from baton.pb.common_pb2 import FinishReason, Score, TokenIds
from baton.pb.generation_pb2 import GenerateRequest, GenerateResponse
from baton.types import TokenScore
from tests import http_exchange
from tests.history import (
    Call,
    Closed,
    Door,
    Echoed,
    Event,
    Failed,
    Finished,
    GaveUp,
    History,
    Hung,
    Operation,
    Served,
    Tokens,
    Unanswered,
)

_PATIENCE = 30.0  # seconds beyond its deadline after which a client calls an operation hung
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a coordinator that is back is found at once
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class Clients:
    """Connections to one coordinator. `perform` runs a call to its end; cancelling it is the client going away.
    After every event `on_event` is called with the operation."""

    def __init__(self, http: str, grpc_endpoint: str, history: History) -> None:
        self.history = history
        self.on_event: Callable[[Operation], None] = lambda operation: None
        host, _, port = http.rpartition(":")
        self._http = (host, int(port))
        self._channel = grpc.aio.insecure_channel(grpc_endpoint, options=_CHANNEL)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._doors = {
            Door.SSE: self._sse,
            Door.HTTP: self._unary_http,
            Door.GRPC_STREAM: self._grpc_stream,
            Door.GRPC_ONCE: self._grpc_once,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def perform(self, call: Call) -> Operation:
        return await self.carry_out(self.history.begin(call, time.monotonic()))

    async def carry_out(self, operation: Operation) -> Operation:
        """An operation that has begun. Never raises for what the cluster does."""
        call = operation.call
        asking = asyncio.create_task(self._follow(operation), name=str(operation))
        leaving: asyncio.TimerHandle | None = None
        if call.give_up_in is not None:
            leaving = asyncio.get_running_loop().call_later(call.give_up_in, asking.cancel)
        try:
            async with asyncio.timeout(call.timeout + _PATIENCE):
                await asyncio.wait({asking})
        except (TimeoutError, asyncio.CancelledError) as reason:
            asking.cancel()
            await asyncio.wait({asking})
            end = Hung() if isinstance(reason, TimeoutError) else GaveUp()
            operation.events[-1:] = [(time.monotonic(), end)]  # instead of the note of its cancellation
        finally:
            if leaving is not None:
                leaving.cancel()
        if not asking.cancelled():
            asking.result()
        return operation

    async def _follow(self, operation: Operation) -> None:
        received = 0
        try:
            async with contextlib.aclosing(self._doors[operation.call.door](operation.call)) as events:
                async for event in events:
                    self._note(operation, event)
                    if isinstance(event, Tokens):
                        received += len(event.tokens)
                    if operation.call.give_up_after is not None and received >= operation.call.give_up_after:
                        break
                else:
                    return
            self._note(operation, GaveUp())
        except asyncio.CancelledError:
            self._note(operation, GaveUp())
        except ConnectionRefusedError as error:
            self._note(operation, Failed("UNAVAILABLE", f"cannot connect: {error}"))
        except http_exchange.Cut as cut:
            self._note(operation, Closed(in_order=False) if cut.answered else Unanswered())
        except grpc.aio.AioRpcError as error:
            self._note(operation, Failed(error.code().name, error.details() or ""))

    def _note(self, operation: Operation, event: Event) -> None:
        operation.events.append((time.monotonic(), event))
        self.on_event(operation)

    # the doors

    async def _sse(self, call: Call) -> AsyncGenerator[Event, None]:
        body = _body(call) | {"stream": True, "stream_options": {"include_usage": True}}
        reason, over = "", False
        async with http_exchange.post(self._http, "/v1/completions", body, _headers(call)) as answer:
            if answer.status != 200:
                yield _refused(answer.status, await answer.body())
                return
            yield Served(answer.headers["x-baton-request-id"])
            async for line in answer.lines():
                if not line:
                    continue
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    over = True
                    yield Closed(in_order=True)
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    yield _failed(chunk)
                    return
                for choice in chunk["choices"]:
                    if choice["token_ids"]:
                        yield Tokens(tuple(choice["token_ids"]), choice["index"])
                    reason = choice["finish_reason"] or reason
                if not chunk["choices"]:
                    usage = chunk["usage"]
                    yield Finished(reason, usage["prompt_tokens"], usage["completion_tokens"])
        if not over:
            yield Closed(in_order=False)

    async def _unary_http(self, call: Call) -> AsyncGenerator[Event, None]:
        async with http_exchange.post(self._http, "/v1/completions", _body(call), _headers(call)) as answer:
            body = await answer.body()
        if answer.status != 200:
            yield _refused(answer.status, body)
            return
        yield Served(answer.headers["x-baton-request-id"])
        whole = json.loads(body)
        choices, usage = whole["choices"], whole["usage"]
        for choice in choices:
            yield Tokens(tuple(choice["token_ids"]), choice["index"])
        yield Finished(choices[0]["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])
        yield Closed(in_order=True)

    async def _grpc_stream(self, call: Call) -> AsyncGenerator[Event, None]:
        asked = self._stub.Generate(_message(call), timeout=call.timeout)
        try:
            async for response in asked:
                for event in _events(response):
                    yield event
        finally:
            asked.cancel()
        yield Closed(in_order=True)

    async def _grpc_once(self, call: Call) -> AsyncGenerator[Event, None]:
        for event in _events(await self._stub.GenerateOnce(_message(call), timeout=call.timeout)):
            yield event
        yield Closed(in_order=True)


def _headers(call: Call) -> dict[str, str]:
    return {"x-request-timeout": f"{call.timeout:g}"}


def _body(call: Call) -> dict[str, Any]:
    return {
        "prompt": list(call.prompt),
        "max_tokens": call.max_tokens,
        "return_token_ids": True,
        "n": call.n,
        "stop_token_ids": list(call.stop_ids),
        **_sampling(call),
    }


def _message(call: Call) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=call.prompt),
        max_tokens=call.max_tokens,
        n=call.n,
        stop_token_ids=call.stop_ids,
        logprobs=call.logprobs,
        echo=call.echo,
        **_sampling(call),
    )


def _sampling(call: Call) -> dict[str, Any]:
    if call.seed is None:
        return {"temperature": 0.0}
    return {"temperature": 0.7, "seed": call.seed, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.5}


def _events(response: GenerateResponse) -> list[Event]:
    found: list[Event] = []
    for part in (response, *response.others):
        if part.HasField("prompt"):
            found.append(Echoed(tuple(part.prompt.token_ids), part.choice, _scores(part.prompt.scores)))
        if part.token_ids:
            found.append(Tokens(tuple(part.token_ids), part.choice, _scores(part.scores)))
    if response.HasField("usage"):
        found.append(Served(response.request_id, tuple(response.timeline.models)))
        reason = FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
        found.append(Finished(reason, response.usage.prompt_tokens, response.usage.completion_tokens))
    return found


def _scores(scores: Iterable[Score]) -> tuple[TokenScore, ...]:
    return tuple(wire.score_from_pb(score) for score in scores)


def _refused(status: int, body: bytes) -> Failed:
    """An answer without tokens, which must have OpenAI's shape."""
    try:
        return _failed(json.loads(body))
    except (ValueError, KeyError, TypeError):
        return Failed("UNKNOWN", f"HTTP {status} with the body {body[:100]!r}")


def _failed(body: dict[str, Any]) -> Failed:
    error = body["error"]
    return Failed(BY_CODE.get(error["code"], BatonError).grpc_code, error["message"])
