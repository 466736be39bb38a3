"""A client for OpenAI-compatible chat completions."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from baton.cli.common.errors import CommandFailed, EndpointUnreachable
from baton.errors import ConfigError

_MAX_EVENT_BYTES = 1 << 20
_MAX_BODY_BYTES = 4 << 20
_DONE = "[DONE]"


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
        with self._open_connection() as connection:
            response = self._send(connection, "GET", "models")
            try:
                return str(json.loads(_read_body(response))["data"][0]["id"])
            except (ValueError, LookupError, TypeError, httpx2.HTTPError):
                raise ChatRefused(
                    f"{self.url} is not an OpenAI-compatible endpoint: it lists no models"
                ) from None

    def stream_answer(self, body: Mapping[str, Any]) -> Iterator[AnswerChunk]:
        """Yield the answer as it arrives; closing the iterator cancels the request.

        Raises ChatRefused or EndpointUnreachable.
        """
        with self._open_connection() as connection:
            body = {**body, "stream": True}
            response = self._send(connection, "POST", "chat/completions", body)
            try:
                for event in _events(response):
                    yield from _answer_chunks(event)
            except httpx2.HTTPError as error:
                raise EndpointUnreachable(
                    f"the connection to {self.url} was lost: {error or type(error).__name__}"
                ) from None

    def _open_connection(self) -> httpx2.Client:
        """Raises ConfigError."""
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"--url {self.url!r} is not an http:// or https:// URL")
        path = url.path.rstrip("/")
        headers = {"Accept": "text/event-stream, application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return httpx2.Client(
            base_url=url.copy_with(path=path if path.endswith("/v1") else f"{path}/v1"),
            headers=headers,
            timeout=self.timeout_seconds,
            trust_env=False,  # neither proxies nor passwords from the environment
            verify=url.scheme == "https",  # loading certificates takes 50 ms
        )

    def _send(
        self,
        connection: httpx2.Client,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> httpx2.Response:
        """Return the response, whose body is still to be read."""
        request = connection.build_request(method, path, json=body)
        try:
            response = connection.send(request, stream=True)
            if response.status_code != 200:
                raise _refusal_from_status(response.status_code, _read_body(response))
        except httpx2.HTTPError as error:
            raise EndpointUnreachable(
                f"no response from {self.url}: {error or type(error).__name__}: see --url"
            ) from None
        return response


def _read_body(response: httpx2.Response) -> bytes:
    """Return the body, up to _MAX_BODY_BYTES."""
    body = b""
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            break
    return body[:_MAX_BODY_BYTES]


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of the stream until [DONE].

    Raises HTTPError when the stream ends early or is not made of JSON events.
    """
    for message in httpx2.EventSource(response, _MAX_EVENT_BYTES):
        if message.data == _DONE:
            return
        try:
            event = message.json()
        except ValueError:
            raise httpx2.RemoteProtocolError("an event is not JSON") from None
        if isinstance(event, dict):
            yield event
    raise httpx2.RemoteProtocolError("the response ended early")


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
