"""Clients of a real cluster, through every door, that write down what they see
(tests/history.py)."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any, Self

import grpc.aio

from baton.cluster_link import pb_conversion as wire
from baton.errors import ERRORS_BY_CODE, BatonError
from baton.pb import generation_pb2_grpc
from baton.pb.common_pb2 import FinishReason, Score, TokenIds
from baton.pb.generation_pb2 import GenerateRequest, GenerateResponse
from baton.types import TokenLogprobs
from tests import http_exchange
from tests.history import (
    ClientApi,
    ClientCall,
    Closed,
    EchoedPrompt,
    Event,
    Failed,
    Finished,
    GaveUp,
    History,
    Hung,
    Operation,
    RequestIdentity,
    Tokens,
    Unanswered,
)

_HANG_TIMEOUT_SECONDS = (
    30.0  # seconds beyond its deadline after which a client calls an operation hung
)
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a coordinator that is back is found at once
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class RecordingClients:
    """Connections to one coordinator. `run_call` runs a call to its end; cancelling it is the
    client going away. After every event `on_event` is called with the operation."""

    def __init__(self, http: str, grpc_endpoint: str, history: History) -> None:
        self.history = history
        self.on_event: Callable[[Operation], None] = lambda operation: None
        host, _, port = http.rpartition(":")
        self._http = (host, int(port))
        self._channel = grpc.aio.insecure_channel(grpc_endpoint, options=_CHANNEL_OPTIONS)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._apis = {
            ClientApi.SSE: self._sse,
            ClientApi.HTTP: self._unary_http,
            ClientApi.GRPC_STREAM: self._grpc_stream,
            ClientApi.GRPC_ONCE: self._grpc_once,
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def run_call(self, call: ClientCall) -> Operation:
        return await self.run_operation(self.history.begin_operation(call, time.monotonic()))

    async def run_operation(self, operation: Operation) -> Operation:
        """An operation that has begun. Never raises for what the cluster does."""
        call = operation.call
        asking = asyncio.create_task(self._record_events(operation), name=str(operation))
        leaving: asyncio.TimerHandle | None = None
        if call.cancel_after_seconds is not None:
            leaving = asyncio.get_running_loop().call_later(
                call.cancel_after_seconds, asking.cancel
            )
        try:
            async with asyncio.timeout(call.timeout_seconds + _HANG_TIMEOUT_SECONDS):
                await asyncio.wait({asking})
        except (TimeoutError, asyncio.CancelledError) as reason:
            asking.cancel()
            await asyncio.wait({asking})
            end = Hung() if isinstance(reason, TimeoutError) else GaveUp()
            operation.events[-1:] = [
                (time.monotonic(), end)
            ]  # instead of the note of its cancellation
        finally:
            if leaving is not None:
                leaving.cancel()
        if not asking.cancelled():
            asking.result()
        return operation

    async def _record_events(self, operation: Operation) -> None:
        received = 0
        try:
            async with contextlib.aclosing(
                self._apis[operation.call.api](operation.call)
            ) as events:
                async for event in events:
                    self._record_event(operation, event)
                    if isinstance(event, Tokens):
                        received += len(event.tokens)
                    if (
                        operation.call.cancel_after_tokens is not None
                        and received >= operation.call.cancel_after_tokens
                    ):
                        break
                else:
                    return
            self._record_event(operation, GaveUp())
        except asyncio.CancelledError:
            self._record_event(operation, GaveUp())
        except ConnectionRefusedError as error:
            self._record_event(operation, Failed("UNAVAILABLE", f"cannot connect: {error}"))
        except http_exchange.ConnectionCut as cut:
            self._record_event(
                operation, Closed(is_orderly=False) if cut.is_mid_response else Unanswered()
            )
        except grpc.aio.AioRpcError as error:
            self._record_event(operation, Failed(error.code().name, error.details() or ""))

    def _record_event(self, operation: Operation, event: Event) -> None:
        operation.events.append((time.monotonic(), event))
        self.on_event(operation)

    # the doors

    async def _sse(self, call: ClientCall) -> AsyncGenerator[Event, None]:
        body = _body(call) | {"stream": True, "stream_options": {"include_usage": True}}
        reason, over = "", False
        async with http_exchange.post(
            self._http, "/v1/completions", body, _headers(call)
        ) as answer:
            if answer.status != 200:
                yield _http_failure(answer.status, await answer.read_body())
                return
            yield RequestIdentity(answer.headers["x-baton-request-id"])
            async for line in answer.read_lines():
                if not line:
                    continue
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    over = True
                    yield Closed(is_orderly=True)
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    yield _failure(chunk)
                    return
                for choice in chunk["choices"]:
                    if choice["token_ids"]:
                        yield Tokens(tuple(choice["token_ids"]), choice["index"])
                    reason = choice["finish_reason"] or reason
                if not chunk["choices"]:
                    usage = chunk["usage"]
                    yield Finished(reason, usage["prompt_tokens"], usage["completion_tokens"])
        if not over:
            yield Closed(is_orderly=False)

    async def _unary_http(self, call: ClientCall) -> AsyncGenerator[Event, None]:
        async with http_exchange.post(
            self._http, "/v1/completions", _body(call), _headers(call)
        ) as answer:
            body = await answer.read_body()
        if answer.status != 200:
            yield _http_failure(answer.status, body)
            return
        yield RequestIdentity(answer.headers["x-baton-request-id"])
        whole = json.loads(body)
        choices, usage = whole["choices"], whole["usage"]
        for choice in choices:
            yield Tokens(tuple(choice["token_ids"]), choice["index"])
        yield Finished(
            choices[0]["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]
        )
        yield Closed(is_orderly=True)

    async def _grpc_stream(self, call: ClientCall) -> AsyncGenerator[Event, None]:
        asked = self._stub.Generate(_message(call), timeout=call.timeout_seconds)
        try:
            async for response in asked:
                for event in _events(response):
                    yield event
        finally:
            asked.cancel()
        yield Closed(is_orderly=True)

    async def _grpc_once(self, call: ClientCall) -> AsyncGenerator[Event, None]:
        for event in _events(
            await self._stub.GenerateOnce(_message(call), timeout=call.timeout_seconds)
        ):
            yield event
        yield Closed(is_orderly=True)


def _headers(call: ClientCall) -> dict[str, str]:
    return {"x-request-timeout": f"{call.timeout_seconds:g}"}


def _body(call: ClientCall) -> dict[str, Any]:
    return {
        "prompt": list(call.prompt),
        "max_tokens": call.max_tokens,
        "return_token_ids": True,
        "n": call.n,
        "stop_token_ids": list(call.stop_token_ids),
        **_sampling(call),
    }


def _message(call: ClientCall) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=call.prompt),
        max_tokens=call.max_tokens,
        n=call.n,
        stop_token_ids=call.stop_token_ids,
        logprobs=call.logprobs,
        echo=call.echo,
        **_sampling(call),
    )


def _sampling(call: ClientCall) -> dict[str, Any]:
    if call.seed is None:
        return {"temperature": 0.0}
    return {
        "temperature": 0.7,
        "seed": call.seed,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
    }


def _events(response: GenerateResponse) -> list[Event]:
    found: list[Event] = []
    for part in (response, *response.others):
        if part.HasField("prompt"):
            found.append(
                EchoedPrompt(tuple(part.prompt.token_ids), part.choice, _scores(part.prompt.scores))
            )
        if part.token_ids:
            found.append(Tokens(tuple(part.token_ids), part.choice, _scores(part.scores)))
    if response.HasField("usage"):
        found.append(RequestIdentity(response.request_id, tuple(response.timeline.models)))
        reason = FinishReason.Name(response.finish_reason).removeprefix("FINISH_REASON_").lower()
        found.append(
            Finished(reason, response.usage.prompt_tokens, response.usage.completion_tokens)
        )
    return found


def _scores(scores: Iterable[Score]) -> tuple[TokenLogprobs, ...]:
    return tuple(wire.logprobs_from_pb(score) for score in scores)


def _http_failure(status: int, body: bytes) -> Failed:
    """An answer without tokens, which must have OpenAI's shape."""
    try:
        return _failure(json.loads(body))
    except (ValueError, KeyError, TypeError):
        return Failed("UNKNOWN", f"HTTP {status} with the body {body[:100]!r}")


def _failure(body: dict[str, Any]) -> Failed:
    error = body["error"]
    return Failed(ERRORS_BY_CODE.get(error["code"], BatonError).grpc_code, error["message"])
