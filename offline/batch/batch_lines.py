"""Lines of batch files, as OpenAI's Batch API has them: requests come in, answers go out."""

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import BatonError, InvalidRequest
from baton.limits import MAX_BODY_BYTES
from offline.endpoint import EndpointAnswer

ROUTES = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = MAX_BODY_BYTES + (64 << 10)  # a body, and what is around it
MAX_CUSTOM_ID_CHARACTERS = 512

_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BadLine(InvalidRequest):
    """A line of the input is no request."""

    code = "invalid_line"

    def __init__(self, number: int, custom_id: str | None, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")
        self.number = number
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    number: int  # of the line, from 1
    custom_id: str
    path: str
    body: bytes  # JSON


class AnswerKey(msgspec.Struct):
    """What tells which line of the input a line of the output answers."""

    class Response(msgspec.Struct):
        status_code: int

    class Error(msgspec.Struct):
        line: int | None = None  # of a bad line, which may have no id

    custom_id: str | None
    response: Response | None
    error: Error | None

    @property
    def is_failure(self) -> bool:
        return self.response is None or self.response.status_code != 200


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


def find_custom_id(line: bytes) -> str | None:
    """Return the id of a line, also of a bad one; None if it has none."""
    try:
        return _decode_custom_id(_decode_fields(line))
    except (*_MALFORMED, ValueError):
        return None


def parse_request(number: int, line: bytes) -> BatchRequest:
    """Raises BadLine."""
    custom_id: str | None = None
    try:
        fields = _decode_fields(line)
        custom_id = _decode_custom_id(fields)
        if _decode(fields, "method") != "POST":
            raise ValueError(f"method is {_show(fields, 'method')}: it must be POST")
        path = _decode(fields, "url")
        if path not in ROUTES:
            raise ValueError(f"url is {_show(fields, 'url')}: it must be {' or '.join(ROUTES)}")
        body = fields.get("body", msgspec.Raw(b"null"))
        decoded = _decode(fields, "body")
        if not isinstance(decoded, dict):
            raise ValueError(f"body is {_show(fields, 'body')}: it must be an object")
        if decoded.get("stream"):
            raise ValueError("body.stream is given: answers of a batch are not streamed")
    except _MALFORMED as error:
        raise BadLine(number, custom_id, f"it is not a JSON object ({error})") from None
    except ValueError as error:
        raise BadLine(number, custom_id, str(error)) from None
    return BatchRequest(number, custom_id, path, bytes(body))


def encode_answer(request: BatchRequest, answer: EndpointAnswer) -> bytes:
    """Return the line of an answer, with its line break."""
    try:
        body: object = msgspec.Raw(msgspec.json.format(answer.content, indent=-1))
    except msgspec.DecodeError:  # of a proxy, for example
        body = {"error": {"message": answer.content[:1024].decode(errors="replace")}}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return _encode_line(request.custom_id, response, None)


def encode_error(number: int, custom_id: str | None, error: BatonError) -> bytes:
    """Return the line of a request that got no answer, with its line break."""
    detail = {"code": error.code, "message": error.message, "param": error.param, "line": number}
    return _encode_line(custom_id, None, detail)


def count_tokens(answer: EndpointAnswer) -> int:
    """Return how many tokens were generated for an answer."""
    try:
        return msgspec.json.decode(answer.content, type=_Answer).usage.completion_tokens
    except msgspec.DecodeError:  # an error has none
        return 0


def decode_answer_key(line: bytes) -> AnswerKey:
    """Raises msgspec.DecodeError for a line that is no answer."""
    return msgspec.json.decode(line, type=AnswerKey)


def _decode_fields(line: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(line, type=dict[str, msgspec.Raw])


def _decode_custom_id(fields: dict[str, msgspec.Raw]) -> str:
    custom_id = _decode(fields, "custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        raise ValueError(
            f"custom_id is {_show(fields, 'custom_id')}: it must be a text of 1 to"
            f" {MAX_CUSTOM_ID_CHARACTERS} characters"
        )
    return custom_id


def _decode(fields: dict[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(fields[name]) if name in fields else None


def _show(fields: dict[str, msgspec.Raw], name: str) -> str:
    if name not in fields:
        return "missing"
    given = bytes(fields[name])
    text = given[:64].decode(errors="replace")
    return text if len(given) <= 64 else text + "..."


def _encode_line(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"
