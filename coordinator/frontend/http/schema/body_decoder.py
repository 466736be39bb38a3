"""Decodes JSON bodies to typed requests; unknown fields are errors or dropped, as configured.

A decoder holds Python's lock until it is done, so the number of objects is bounded before a body is
decoded, and duplicate names are rejected. Both checks look at bytes alone, with escapes blanked, so
that every quote begins or ends a string.
"""

import re
from collections.abc import Callable
from typing import ClassVar, Generic, NoReturn, TypeVar

import msgspec

from baton.errors import InvalidRequest
from baton.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_KEYS,
    MAX_JSON_STRINGS,
    MAX_JSON_VALUES,
    check_entry_count,
    check_message_count,
    check_prompt_count,
)
from coordinator.frontend.http.schema.unsupported_fields import (
    NoOpValues,
    build_field_tree,
    remove_unknown_fields,
    with_unsupported_fields,
)
from coordinator.frontend.unknown_fields import REJECT_UNKNOWN_FIELDS, UnknownFieldPolicy
from coordinator.text.text_workers import TextWorkers

# Shorter bodies cannot exceed the bounds, because every item takes at least two bytes.
_ALWAYS_WITHIN_BYTES = 2 * min(MAX_JSON_CONTAINERS, MAX_JSON_KEYS)
_NAMES_AND_BRACES = re.compile(rb'"([^"]*)"(\s*:)?|[{}]')
_MAX_SHOWN_CHARS = 64  # characters of a name


def blank_escapes(body: bytes) -> bytes:
    """Overwrite escaped quotes and backslashes without changing the length of the body."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body


def check_json_size(plain: bytes) -> None:
    """Raises InvalidRequest for too many names, strings, objects, arrays or values.

    `plain` is the body without escapes.
    """
    if len(plain) < _ALWAYS_WITHIN_BYTES:
        return
    strings = plain.count(b'"') // 2
    if strings > MAX_JSON_STRINGS:
        _raise_too_many(strings, "strings", MAX_JSON_STRINGS)
    structure = b"".join(plain.split(b'"')[::2])
    names, containers = structure.count(b":"), structure.count(b"{") + structure.count(b"[")
    if names > MAX_JSON_KEYS:
        _raise_too_many(names, "names", MAX_JSON_KEYS)
    if containers > MAX_JSON_CONTAINERS:
        _raise_too_many(containers, "objects and arrays", MAX_JSON_CONTAINERS)
    values = structure.count(b",")
    if values > MAX_JSON_VALUES:
        _raise_too_many(values, "values", MAX_JSON_VALUES)


def check_duplicate_names(body: bytes, plain: bytes) -> None:
    """Raises InvalidRequest for a name that an object has twice, because JSON parsers differ.

    `body` is valid JSON, and `plain` is the body without escapes.
    """
    if plain.count(b":") < 2:
        return
    objects: list[set[bytes | str]] = []  # names of each enclosing object
    for match in _NAMES_AND_BRACES.finditer(plain):
        if match.lastindex == 2:
            name = _normalize_name(body[match.start(1) : match.end(1)])
            if name in objects[-1]:
                shown = name if isinstance(name, str) else name.decode()
                shown = (
                    shown
                    if len(shown) <= _MAX_SHOWN_CHARS
                    else shown[: _MAX_SHOWN_CHARS - 3] + "..."
                )
                raise InvalidRequest(f"{shown} is given twice", param=shown)
            objects[-1].add(name)
        elif match.lastindex is None:
            if plain[match.start()] == 0x7B:
                objects.append(set())
            else:
                objects.pop()


def _normalize_name(written: bytes) -> bytes | str:
    """Return the same value for all spellings of a name."""
    if b"\\" not in written:
        return written
    read = msgspec.json.decode(b'"%b"' % written, type=str)
    plain = msgspec.json.encode(read)[1:-1]
    return read if b"\\" in plain else plain


def _raise_too_many(count: int, items: str, limit: int) -> NoReturn:
    raise InvalidRequest(f"the body has {count} {items}: at most {limit}")


MAX_INLINE_BYTES = 16 << 10  # longer bodies are decoded off the event loop
_WRONG_TYPE_ERROR = re.compile(r" - at `\$\.(?P<field>\w+)(?P<rest>[^`]*)`$")
_UNKNOWN_FIELD_ERROR = re.compile(
    r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.(?P<parent>[^`]+)`)?$", re.DOTALL
)
# Error messages never quote the values of these fields.
_CONTENT_FIELDS = frozenset({"prompt", "messages", "tokens", "tools"})


class RequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request body."""

    # Values other than null that are accepted for fields that are not supported.
    no_ops: ClassVar[NoOpValues] = {}


Kind = TypeVar("Kind", bound=RequestBody)
Result = TypeVar("Result")


class BodyDecoder(Generic[Kind]):
    """Decodes the bodies of one type."""

    def __init__(
        self, body_type: type[Kind], policy: UnknownFieldPolicy = REJECT_UNKNOWN_FIELDS
    ) -> None:
        wire_type: type[Kind] = with_unsupported_fields(body_type)
        self._decoder = msgspec.json.Decoder(wire_type)
        self._field_tree = build_field_tree(wire_type)
        self._unknown_field_policy = policy

    async def decode_body(self, body: bytes, workers: TextWorkers) -> Kind:
        """Decode a body.

        Raises InvalidRequest, which names the field and what is wrong with it, and Overloaded
        when too much text waits for a thread.
        """
        return await self.decode_and_apply(body, workers, lambda request: request)

    async def decode_and_apply(
        self, body: bytes, workers: TextWorkers, convert: Callable[[Kind], Result]
    ) -> Result:
        """Decode a body and return `convert` of it; both run in a thread if the body is long."""

        def work() -> Result:
            return convert(self.decode_inline(body))

        return work() if len(body) <= MAX_INLINE_BYTES else await workers.run_work(work, len(body))

    def decode_inline(self, body: bytes) -> Kind:
        plain = blank_escapes(body)
        check_json_size(plain)
        try:
            request = self._decode_known_fields(body)
        except msgspec.ValidationError as error:
            raise _to_invalid_request(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(error) from None
        check_duplicate_names(body, plain)
        _check_counts(request)
        _check_no_ops(request)
        return request

    def _decode_known_fields(self, body: bytes) -> Kind:
        """Decode a body, after removing unknown fields if they are to be ignored."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            if not (
                self._unknown_field_policy.is_ignoring and _UNKNOWN_FIELD_ERROR.match(str(error))
            ):
                raise
        known, dropped = remove_unknown_fields(body, self._field_tree)
        self._unknown_field_policy.count_dropped(dropped)
        return self._decoder.decode(known)


_raw_field_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _check_counts(request: RequestBody) -> None:
    """Bound the lists and maps that later code iterates over. Raises InvalidRequest."""
    for field in ("stop", "stop_token_ids", "logit_bias", "chat_template_kwargs"):
        value = getattr(request, field, None)
        if isinstance(value, list | dict):
            check_entry_count(field, len(value))
    messages, prompt = getattr(request, "messages", None), getattr(request, "prompt", None)
    if messages:
        check_message_count(len(messages))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int | float):
        check_prompt_count(len(prompt))


def _check_no_ops(request: RequestBody) -> None:
    for field, accepted in request.no_ops.items():
        value = getattr(request, field)
        if value is None or any(
            type(value) in _matching_types(no_op) and value == no_op for no_op in accepted
        ):
            continue
        allowed = " or ".join(
            ["null", *(msgspec.json.encode(no_op).decode() for no_op in accepted)]
        )
        shown = truncate_text(msgspec.json.encode(value).decode())
        raise InvalidRequest(
            f"{field} is {shown}: not available, it must be {allowed}", param=field
        )


def _matching_types(no_op: object) -> tuple[type, ...]:
    """Return the types that may equal a no-op value: JSON has one number type, bools apart."""
    return (int, float) if type(no_op) is int else (type(no_op),)


def _to_invalid_request(reason: str, body: bytes) -> InvalidRequest:
    unknown_field = _UNKNOWN_FIELD_ERROR.match(reason)
    if unknown_field:
        field = ".".join(filter(None, (unknown_field["parent"], unknown_field["field"])))[:64]
        return InvalidRequest(f"{field} is not a field of this request", param=field)
    at = _WRONG_TYPE_ERROR.search(reason)
    if at is None:
        return InvalidRequest(f"the body must be a JSON object: {reason}")
    field, rest, expected = at["field"], at["rest"], reason[: at.start()]
    try:
        worded = bytes(_raw_field_decoder.decode(body)[field]).decode()
    except RecursionError:  # only this pass looks inside a value of the wrong type
        return InvalidRequest(f"{field} is nested too deeply: {expected}", param=field)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:  # and only this one reads on from there
        return _not_json(error)
    if field in _CONTENT_FIELDS:
        return InvalidRequest(f"{field}{rest} is of the wrong type: {expected}", param=field)
    return InvalidRequest(
        f"{field} is {truncate_text(worded)}: {expected}{rest and f' at {rest}'}", param=field
    )


def _not_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not JSON: {error}")


def truncate_text(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
