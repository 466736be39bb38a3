"""A client of POST /v1/completions for load generation, on any OpenAI-compatible endpoint."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from benchmarks.load import http_stream
from benchmarks.load import request_plan as schedule
from benchmarks.load.http_stream import HttpError, HttpTarget, StreamedResponse
from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest

_MAX_EVENT_BYTES = 1 << 20
_DATA, _DONE = b"data:", b"[DONE]"


class _EventChoice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _EventUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _StreamEvent(msgspec.Struct):
    choices: list[_EventChoice] = []
    usage: _EventUsage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_StreamEvent).decode


@dataclass(frozen=True, slots=True)
class EndpointFeatures:
    """Optional features of the endpoint, as `CompletionsClient.probe_features` finds them."""

    token_prompts: bool = True
    ignore_eos: bool = True  # without it, answers may be shorter than requested
    return_token_ids: bool = True  # without it, a message with text counts as one token
    include_usage: bool = True


# Request field -> feature, dropped one at a time in this order when the endpoint refuses it.
_OPTIONAL_FIELDS = {
    "return_token_ids": "return_token_ids",
    "ignore_eos": "ignore_eos",
    "stream_options": "include_usage",
    "prompt": "token_prompts",
}


@dataclass(frozen=True, slots=True)
class CompletionsClient:
    """A client of one endpoint."""

    target: HttpTarget
    model: str
    api_key: str
    vocab_size: int  # upper bound of the token ids in random prompts
    timeout_seconds: float  # for one whole request
    features: EndpointFeatures = EndpointFeatures()
    temperature: float = 0.0  # 0 samples greedily
    top_p: float = 1.0

    async def measure_request(self, request: PlannedRequest, due: float) -> RequestMeasurement:
        """Send one request and record its tokens. A failure is recorded and not raised."""
        measurement = RequestMeasurement(
            due, request.output_tokens, requested_prompt_tokens=request.prompt_tokens
        )
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self._record_answer(request, measurement)
        except TimeoutError:
            measurement.error = "timeout"
        except (OSError, HttpError, msgspec.DecodeError) as error:
            measurement.error = type(error).__name__
        measurement.ended_at = time.perf_counter()
        return measurement

    async def probe_features(self) -> "CompletionsClient":
        """Return a client that uses only features which the endpoint accepts.

        Raises ValueError with the endpoint's answer if there is none, and OSError or HttpError when
        the endpoint cannot be reached.
        """
        client = self
        for _ in range(len(_OPTIONAL_FIELDS) + 1):
            async with client._post(PlannedRequest(0.0, 4, 2, seed=1)) as response:
                if response.status == 200:
                    return await client._drop_ignored_features(response)
                answer = (await response.read_body()).decode(errors="replace")
            refused = client._find_refused_feature(answer)
            if response.status not in (400, 422) or refused is None:
                raise ValueError(f"the endpoint answers {response.status}: {answer[:500]}")
            client = replace(client, features=replace(client.features, **{refused: False}))
        raise ValueError("the endpoint accepts no form of request that this client knows")

    async def _drop_ignored_features(self, response: StreamedResponse) -> "CompletionsClient":
        """Return a client that counts messages if the answer has text without token ids."""
        measurement = RequestMeasurement(0.0, 2)
        has_text = False
        async for moment, data in read_events(response):
            if data != _DONE:
                event = _decode_event(data)
                has_text |= any(choice.text for choice in event.choices)
                _record_event(measurement, moment, event, self.features)
        if measurement.token_arrivals or not has_text:
            return self
        return replace(self, features=replace(self.features, return_token_ids=False))

    def _find_refused_feature(self, answer: str) -> str | None:
        """Return the optional feature that an error names."""
        named = _blamed_field(answer)
        for field, feature in _OPTIONAL_FIELDS.items():
            if getattr(self.features, feature) and (
                named == field or (named is None and field in answer)
            ):
                return feature
        return None

    def _post(self, request: PlannedRequest) -> AbstractAsyncContextManager[StreamedResponse]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        path = "/completions" if self.target.base_path.endswith("/v1") else "/v1/completions"
        return http_stream.open_request(
            self.target, "POST", path, headers, json.dumps(self._request_body(request)).encode()
        )

    def _request_body(self, request: PlannedRequest) -> dict[str, Any]:
        tokens = self.features.token_prompts
        prompt = (
            schedule.make_token_prompt(request, self.vocab_size)
            if tokens
            else schedule.make_text_prompt(request)
        )
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.top_p < 1.0:
            body["top_p"] = self.top_p
        if self.model:
            body["model"] = self.model
        if self.features.include_usage:
            body["stream_options"] = {"include_usage": True}
        for extension in ("ignore_eos", "return_token_ids"):
            if getattr(self.features, extension):
                body[extension] = True
        return body

    async def _record_answer(
        self, request: PlannedRequest, measurement: RequestMeasurement
    ) -> None:
        async with self._post(request) as response:
            if response.status != 200:
                measurement.error = f"http {response.status}"
                return
            async for moment, data in read_events(response):
                if data == _DONE:
                    return
                _record_event(measurement, moment, _decode_event(data), self.features)
            measurement.error = measurement.error or "no [DONE]"


def _record_event(
    measurement: RequestMeasurement, moment: float, event: _StreamEvent, features: EndpointFeatures
) -> None:
    if event.error is not None:
        measurement.error = "error event"
    if event.usage is not None:
        measurement.usage_tokens = event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            measurement.prompt_tokens = event.usage.prompt_tokens
            measurement.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if event.choices:
        choice = event.choices[0]
        tokens = len(choice.token_ids or ()) if features.return_token_ids else bool(choice.text)
        if tokens:
            measurement.token_arrivals.append((moment, int(tokens)))


async def read_events(response: StreamedResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Yield server-sent events: the time at which the bytes arrived, and the text after `data:`."""
    pending = b""
    async for chunk in response.iter_body():
        moment = time.perf_counter()
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > _MAX_EVENT_BYTES:
            raise HttpError(f"an event is longer than {_MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(_DATA):
                yield moment, line[len(_DATA) :].strip()


def _blamed_field(answer: str) -> str | None:
    """Return the field that an OpenAI-shaped error blames."""
    try:
        param = json.loads(answer)["error"]["param"]
    except (ValueError, KeyError, TypeError):
        return None
    return param if isinstance(param, str) else None
