"""Posts requests to an HTTP endpoint, or to an application in this process, and tries again.

A request that an overloaded or restarting cluster refuses (429, 503), or whose connection breaks,
is sent again after the Retry-After of the answer or a back-off. Requests have no effect but their
answer, so sending one twice does no harm.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx2

from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    HandoffFailed,
    NodeFailed,
    RequestRejected,
    error_from_code,
)
from baton.process.clock import Clock, monotonic_clock

_MODELS = "/v1/models"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between tries without a Retry-After
_CONNECT_SECONDS = 10.0
_CHECK_SECONDS = 30.0  # in which an endpoint has to say which model it serves
_RETRIED_STATUS = frozenset({429, 502, 503})
_MAX_FAILED_TRIES = 3  # of a request that a node failed to answer: it may be the request's fault


class EndpointUnavailable(BatonError):
    """The endpoint does not answer, or has refused a request for as long as it was tried."""

    code = "endpoint_unavailable"


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """The answer to one request."""

    status: int
    request_id: str  # that Baton gave the request; empty if it was refused
    content: bytes
    retry_after: float | None = None  # seconds

    def decode_body(self) -> Any:
        """Return the decoded JSON, or None if it is none."""
        try:
            return json.loads(self.content)
        except ValueError:
            return None

    @property
    def error(self) -> BatonError | None:
        """The error of an answer whose status is not 200."""
        if self.status == 200:
            return None
        detail = _error_in(self.decode_body())
        if not detail:
            start = self.content[:200].decode(errors="replace")
            return RequestRejected(f"the endpoint answered {self.status}: {start}")
        error = error_from_code(str(detail.get("code")), str(detail.get("message")))
        error.param = detail.get("param")
        return error


class Endpoint:
    """A client of one endpoint. Used on one event loop."""

    def __init__(
        self,
        url: str,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        api_key: str = "",
        max_in_flight: int,
        answer_seconds: float,
        retry_seconds: float,
        clock: Clock = monotonic_clock,
    ) -> None:
        """At most `max_in_flight` requests are sent at once.

        Each may take `answer_seconds`, and is tried for `retry_seconds` after its first refusal.
        `transport` leads to an application in this process. Raises ConfigError.
        """
        self._url = url
        self._answer_seconds = answer_seconds
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._free_slots = asyncio.Semaphore(max_in_flight)
        # When a request was given up last; None if one was answered since. Requests that have
        # waited since before are sent once, so that they are not given up one after the other.
        self._given_up_at: float | None = None
        headers = {"content-type": "application/json", "accept": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx2.AsyncClient(
            base_url=_parse_url(url),
            headers=headers,
            transport=transport,
            timeout=httpx2.Timeout(answer_seconds, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=max_in_flight),
            trust_env=False,  # neither proxies nor passwords from the environment
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raise EndpointUnavailable if nothing answers, or what it refuses the caller with.

        A cluster that is overloaded or starts is no error: requests are sent again.
        """
        try:
            timeout = httpx2.Timeout(
                min(_CHECK_SECONDS, self._answer_seconds), connect=_CONNECT_SECONDS
            )
            response = await self._client.get(_MODELS, timeout=timeout)
        except httpx2.HTTPError as error:
            raise self._unavailable(_describe_failure(error)) from None
        answer = _read_answer(response)
        if answer.error is not None and answer.status not in _RETRIED_STATUS:
            raise answer.error

    async def post(self, path: str, body: bytes) -> EndpointAnswer:
        """Return the answer to one request, which may be an error of the request.

        Raises EndpointUnavailable, or DeadlineExceeded if there is no answer in time.
        """
        submitted_at = self._clock()
        async with self._free_slots:
            return await self._send_until_answered("POST", path, submitted_at, body)

    async def fetch_max_model_len(self) -> int:
        """Return the most tokens that prompt and output may have. Raises BatonError."""
        submitted_at = self._clock()
        async with self._free_slots:
            answer = await self._send_until_answered("GET", _MODELS, submitted_at)
        if answer.error is not None:
            raise answer.error
        try:
            return int(answer.decode_body()["data"][0]["max_model_len"])
        except (LookupError, TypeError, ValueError):
            raise BatonError(f"{self._url} does not say how long its model's context is") from None

    async def _send_until_answered(
        self, method: str, path: str, submitted_at: float, body: bytes | None = None
    ) -> EndpointAnswer:
        give_up_at: float | None = None
        tries = failed_tries = 0
        while True:
            answer: EndpointAnswer | None = None
            try:
                answer = _read_answer(await self._client.request(method, path, content=body))
                reason = f"it answers {answer.status} ({answer.error})"
            except httpx2.ReadTimeout:
                raise DeadlineExceeded(
                    f"{self._url} gave no answer within {self._answer_seconds:g} s (timeout)"
                ) from None
            except httpx2.HTTPError as error:
                reason = _describe_failure(error)
            if answer is not None:
                failed_tries += isinstance(answer.error, NodeFailed | HandoffFailed)
                if answer.status not in _RETRIED_STATUS or failed_tries >= _MAX_FAILED_TRIES:
                    self._given_up_at = None
                    return answer
            now = self._clock()
            give_up_at = now + self._retry_seconds if give_up_at is None else give_up_at
            pause = _choose_pause(tries, answer.retry_after if answer else None)
            if self._given_up_at is not None and submitted_at < self._given_up_at:
                raise self._unavailable(reason)
            if now + pause > give_up_at:
                self._given_up_at = now
                raise self._unavailable(f"{reason}, tried for {self._retry_seconds:g} s")
            tries += 1
            await asyncio.sleep(pause)

    def _unavailable(self, reason: str) -> EndpointUnavailable:
        return EndpointUnavailable(f"{self._url} cannot be used: {reason}")


def _parse_url(text: str) -> httpx2.URL:
    """Return the URL without a path of `/v1`, which the routes have. Raises ConfigError."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL:
        url = httpx2.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"the endpoint {text!r} is not an http:// or https:// URL")
    path = url.path.rstrip("/").removesuffix("/v1")
    return url.copy_with(path=path or "/")


def _read_answer(response: httpx2.Response) -> EndpointAnswer:
    retry_after = response.headers.get("retry-after", "")
    return EndpointAnswer(
        response.status_code,
        response.headers.get("x-baton-request-id", ""),
        response.content,
        float(retry_after) if retry_after.isdecimal() else None,
    )


def _choose_pause(tries: int, retry_after: float | None) -> float:
    """Return seconds to wait, with jitter, so that refused requests do not return all at once."""
    if retry_after is not None:
        return retry_after * random.uniform(1.0, 1.5)
    return min(_FIRST_PAUSE * 2.0 ** min(tries, 16), _LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def _error_in(body: Any) -> dict[str, Any]:
    detail = body.get("error") if isinstance(body, dict) else None
    return detail if isinstance(detail, dict) else {}


def _describe_failure(error: httpx2.HTTPError) -> str:
    return str(error) or type(error).__name__
