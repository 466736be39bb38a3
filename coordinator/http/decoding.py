"""JSON bodies to typed requests, strictly: what is not understood is refused by name, unless --unknown-fields says
otherwise."""

import asyncio
import json
import re
from typing import ClassVar, Generic, TypeVar

import msgspec

from baton.errors import InvalidRequest
from coordinator.http.known_fields import shape_of, without_unknown_fields
from coordinator.http.unserved_fields import NoOps, with_unserved_fields
from coordinator.unknown_fields import REFUSED, UnknownFields

INLINE_BYTES = 64 << 10  # longer bodies are decoded off the event loop
_PATH = re.compile(r" - at `\$\.(?P<field>\w+)(?P<rest>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.(?P<parent>[^`]+)`)?$", re.DOTALL)
_SECRET = frozenset({"prompt", "messages", "tokens"})  # fields whose values are repeated nowhere


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request body. `no_ops` says what each field that is not served may say, beside null."""

    no_ops: ClassVar[NoOps] = {}


Kind = TypeVar("Kind", bound=Body)


class Decoder(Generic[Kind]):
    """For one kind of body."""

    def __init__(self, kind: type[Kind], unknown: UnknownFields = REFUSED) -> None:
        wire: type[Kind] = with_unserved_fields(kind)
        self._decoder = msgspec.json.Decoder(wire)
        self._shape = shape_of(wire)
        self._unknown = unknown

    async def decode(self, body: bytes) -> Kind:
        """Raises InvalidRequest naming the field and what is wrong with it."""
        return self.decode_now(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(self.decode_now, body)

    def decode_now(self, body: bytes) -> Kind:
        try:
            request = self._decode_known(body)
            _check_once(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error), body) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_json(error) from None
        _check_no_ops(request)
        return request

    def _decode_known(self, body: bytes) -> Kind:
        """Fields that the schema does not have are removed first, where they are to be ignored."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            if not (self._unknown.ignored and _UNKNOWN.match(str(error))):
                raise
        known, dropped = without_unknown_fields(body, self._shape)
        self._unknown.count_dropped(dropped)
        return self._decoder.decode(known)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _check_once(body: bytes) -> None:
    """Raises InvalidRequest for a field that is given twice: readers of JSON differ in which one counts."""
    if body.count(b":") > 1:
        json.loads(body, object_pairs_hook=_distinct, parse_int=str, parse_float=str)


def _distinct(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequest(f"{cut(name)} is given twice", param=cut(name))
        seen.add(name)


def _check_no_ops(request: Body) -> None:
    for field, accepted in request.no_ops.items():
        value = getattr(request, field)
        if value is None or any(type(value) in _alike(no_op) and value == no_op for no_op in accepted):
            continue
        allowed = " or ".join(["null", *(msgspec.json.encode(no_op).decode() for no_op in accepted)])
        shown = cut(msgspec.json.encode(value).decode())
        raise InvalidRequest(f"{field} is {shown}: not available, it must be {allowed}", param=field)


def _alike(no_op: object) -> tuple[type, ...]:
    """JSON has one number type, and a bool is not a number."""
    return (int, float) if type(no_op) is int else (type(no_op),)


def _explain(reason: str, body: bytes) -> InvalidRequest:
    unknown = _UNKNOWN.match(reason)
    if unknown:
        field = ".".join(filter(None, (unknown["parent"], unknown["field"])))[:64]
        return InvalidRequest(f"{field} is not a field of this request", param=field)
    at = _PATH.search(reason)
    if at is None:
        return InvalidRequest(f"the body must be a JSON object: {reason}")
    field, rest, expected = at["field"], at["rest"], reason[: at.start()]
    try:
        worded = bytes(_fields.decode(body)[field]).decode()
    except RecursionError:  # only this pass looks inside a value of the wrong type
        return InvalidRequest(f"{field} is nested too deeply: {expected}", param=field)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # and only this one reads on from there
        return _not_json(error)
    if field in _SECRET:
        return InvalidRequest(f"{field}{rest} is of the wrong type: {expected}", param=field)
    return InvalidRequest(f"{field} is {cut(worded)}: {expected}{rest and f' at {rest}'}", param=field)


def _not_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not JSON: {error}")


def cut(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
