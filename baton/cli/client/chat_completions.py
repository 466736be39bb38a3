"""A client for OpenAI-compatible chat completions, over the standard library's HTTP."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from baton.cli.common.errors import CommandFailed, EndpointUnreachable
from baton.errors import ConfigError

_MAX_EVENT_BYTES = 1 << 20
_MAX_BODY_BYTES = 4 << 20
_DATA, _DONE = b"data:", b"[DONE]"


class ChatRefused(CommandFailed):
    """The endpoint answered with an error. `error_code` is its `code`, or empty if it has none."""

    def __init__(self, message: str, error_code: str = "") -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A part of the answer."""

    text: str
    finish_reason: str = ""  # empty until the last chunk


@dataclass(frozen=True, slots=True)
class ChatClient:
    """A client of one endpoint; each call opens its own connection."""

    url: str
    api_key: str = ""
    timeout_seconds: float = 600.0  # how long the endpoint may be silent

    def get_first_model(self) -> str:
        """Return the name of the first model served.

        Raises ChatRefused, EndpointUnreachable or ConfigError.
        """
        with closing(self._connection()) as connection:
            response = self._send(connection, "GET", "/models")
            try:
                return str(json.loads(response.read(_MAX_BODY_BYTES))["data"][0]["id"])
            except (ValueError, LookupError, TypeError, http.client.HTTPException, OSError):
                raise ChatRefused(
                    f"{self.url} is not an OpenAI-compatible endpoint: it lists no models"
                ) from None

    def stream_answer(self, body: Mapping[str, Any]) -> Iterator[AnswerChunk]:
        """Yield the answer as it arrives; closing the iterator cancels the request.

        Raises ChatRefused or EndpointUnreachable.
        """
        with closing(self._connection()) as connection:
            response = self._send(connection, "POST", "/chat/completions", {**body, "stream": True})
            try:
                for event in _events(response):
                    yield from _answer_chunks(event)
            except (OSError, http.client.HTTPException) as error:
                raise EndpointUnreachable(
                    f"the connection to {self.url} was lost: {error or type(error).__name__}"
                ) from None

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
        }
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(
                method,
                self._base_path() + path,
                json.dumps(body) if body is not None else None,
                headers,
            )
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal_from_status(response.status, response.read(_MAX_BODY_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise EndpointUnreachable(
                f"no response from {self.url}: {error or type(error).__name__}: see --url"
            ) from None
        return response

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {self.url!r} is not an http:// or https:// URL")
        connection_type = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return connection_type(parts.hostname, parts.port, timeout=self.timeout_seconds)

    def _base_path(self) -> str:
        path = urlsplit(self.url).path.rstrip("/")
        return path if path.endswith("/v1") else f"{path}/v1"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of the stream until [DONE].

    Raises HTTPException when the stream ends early or is not made of JSON events.
    """
    while line := response.readline(_MAX_EVENT_BYTES):
        if not line.startswith(_DATA):
            continue
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise http.client.HTTPException("an event is not JSON") from None
        if isinstance(event, dict):
            yield event
    raise http.client.HTTPException("the response ended early")


def _answer_chunks(event: Mapping[str, Any]) -> Iterator[AnswerChunk]:
    if event.get("error"):
        raise _refusal_from_error(event["error"])
    for choice in event.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or ""
        if text or choice.get("finish_reason"):
            yield AnswerChunk(text, choice.get("finish_reason") or "")


def _refusal_from_status(status: int, body: bytes) -> ChatRefused:
    try:
        return _refusal_from_error(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return ChatRefused(f"the endpoint answers {status}: {body[:200].decode(errors='replace')}")


def _refusal_from_error(error: Any) -> ChatRefused:
    if not isinstance(error, dict):
        return ChatRefused(str(error))
    return ChatRefused(str(error.get("message") or error), str(error.get("code") or ""))
