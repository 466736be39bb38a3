"""A client of POST /v1/completions for load generation, against Baton or any other OpenAI-compatible endpoint."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from benchmarks import http_stream, schedule
from benchmarks.http_stream import HttpError, Response, Target
from benchmarks.measurement import Measurement
from benchmarks.schedule import Planned

_MAX_EVENT = 1 << 20  # bytes
_DATA, _DONE = b"data:", b"[DONE]"


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the endpoint understands beyond the common core, found out by `probe`."""

    token_prompts: bool = True
    ignore_eos: bool = True  # without it answers may be shorter than asked
    return_token_ids: bool = True  # without it a message with text counts as one token
    include_usage: bool = True


# Given up one at a time, in this order, when the endpoint refuses what names them.
_OPTIONAL = {
    "return_token_ids": "return_token_ids",
    "ignore_eos": "ignore_eos",
    "stream_options": "include_usage",
    "prompt": "token_prompts",
}


@dataclass(frozen=True, slots=True)
class Client:
    """One endpoint. `vocabulary` bounds the ids of random prompts; `patience` is seconds for one whole request."""

    target: Target
    model: str
    api_key: str
    vocabulary: int
    patience: float
    dialect: Dialect = Dialect()

    async def measure(self, request: Planned, due: float) -> Measurement:
        """Send one request and watch its tokens arrive. Failures are told by the measurement, never raised."""
        seen = Measurement(due, request.output_tokens, asked_prompt=request.prompt_tokens)
        try:
            async with asyncio.timeout(self.patience):
                await self._watch(request, seen)
        except TimeoutError:
            seen.error = "timeout"
        except (OSError, HttpError, msgspec.DecodeError) as error:
            seen.error = type(error).__name__
        seen.ended = time.perf_counter()
        return seen

    async def probe(self) -> "Client":
        """This client with a dialect that the endpoint accepts. Raises ValueError with its answer when there is none,
        OSError or HttpError when it cannot be reached."""
        client = self
        for _ in range(len(_OPTIONAL) + 1):
            async with client._post(Planned(0.0, 4, 2, seed=1)) as response:
                if response.status == 200:
                    await response.body()
                    return client
                answer = (await response.body()).decode(errors="replace")
            refused = client._refused(answer)
            if response.status not in (400, 422) or refused is None:
                raise ValueError(f"the endpoint answers {response.status}: {answer[:500]}")
            client = replace(client, dialect=replace(client.dialect, **{refused: False}))
        raise ValueError("the endpoint accepts no form of request that this client knows")

    def _refused(self, answer: str) -> str | None:
        """The optional feature that an error names."""
        named = _param(answer)
        for field, feature in _OPTIONAL.items():
            if getattr(self.dialect, feature) and (named == field or (named is None and field in answer)):
                return feature
        return None

    def _post(self, request: Planned) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        path = "/completions" if self.target.base.endswith("/v1") else "/v1/completions"
        return http_stream.request(self.target, "POST", path, headers, json.dumps(self._body(request)).encode())

    def _body(self, request: Planned) -> dict[str, Any]:
        tokens = self.dialect.token_prompts
        prompt = schedule.token_prompt(request, self.vocabulary) if tokens else schedule.text_prompt(request)
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.model:
            body["model"] = self.model
        if self.dialect.include_usage:
            body["stream_options"] = {"include_usage": True}
        for extension in ("ignore_eos", "return_token_ids"):
            if getattr(self.dialect, extension):
                body[extension] = True
        return body

    async def _watch(self, request: Planned, seen: Measurement) -> None:
        async with self._post(request) as response:
            if response.status != 200:
                seen.error = f"http {response.status}"
                return
            async for moment, data in events(response):
                if data == _DONE:
                    return
                _note(seen, moment, _decode(data), self.dialect)
            seen.error = seen.error or "no [DONE]"


def _note(seen: Measurement, moment: float, event: _Event, dialect: Dialect) -> None:
    if event.error is not None:
        seen.error = "error event"
    if event.usage is not None:
        seen.usage_tokens = event.usage.completion_tokens
        if event.usage.prompt_tokens_details is not None:
            seen.prompt_tokens = event.usage.prompt_tokens
            seen.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if event.choices:
        choice = event.choices[0]
        tokens = len(choice.token_ids or ()) if dialect.return_token_ids else bool(choice.text)
        if tokens:
            seen.arrivals.append((moment, int(tokens)))


async def events(response: Response) -> AsyncIterator[tuple[float, bytes]]:
    """Server-sent events: the moment when the bytes arrived, and what follows `data:`."""
    pending = b""
    async for piece in response.pieces():
        moment = time.perf_counter()
        *lines, pending = (pending + piece).split(b"\n")
        if len(pending) > _MAX_EVENT:
            raise HttpError(f"an event is longer than {_MAX_EVENT} bytes")
        for line in lines:
            if line.startswith(_DATA):
                yield moment, line[len(_DATA) :].strip()


def _param(answer: str) -> str | None:
    """The field that an OpenAI-shaped error blames."""
    try:
        param = json.loads(answer)["error"]["param"]
    except (ValueError, KeyError, TypeError):
        return None
    return param if isinstance(param, str) else None
