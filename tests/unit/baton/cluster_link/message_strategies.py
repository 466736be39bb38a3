"""Values of every type that a message or an explanation carries, drawn from its dataclass."""

import dataclasses
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from baton.cluster_link.pb_conversion import LEDGER_STATES
from baton.errors import ERRORS_BY_CODE, BatonError
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Principal,
    Request,
    SamplingParams,
    Ticket,
    TokenLogprobs,
)

counts = st.integers(0, 2**31)
seconds = st.floats(0.0, 1e9)
float32s = st.floats(width=32, allow_nan=False, max_value=0)
shares = st.floats(0.0, 1e3)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple)
errors = st.builds(
    lambda kind, text, param: kind(text, param=param),
    st.sampled_from(sorted(ERRORS_BY_CODE.values(), key=lambda kind: kind.code)),
    st.text(),
    st.none() | st.text(min_size=1),
)


@st.composite
def attempt_specs(draw: st.DrawFn) -> AttemptSpec:
    """A tenant's name is not sent, and the request's id and choice are those of the key."""
    key = draw(strategy_of(AttemptKey))
    principal = Principal(tenant_class=draw(st.text()), priority_level=draw(counts))
    request = Request(
        key.request_id,
        tuple(draw(st.lists(counts, max_size=9))),
        draw(strategy_of(SamplingParams)),
        draw(seconds),
        draw(st.binary(max_size=8)),
        key.choice_index,
        principal,
    )
    emitted = tuple(draw(st.lists(counts, max_size=3)))
    return AttemptSpec(key, request, emitted, draw(st.text()), draw(st.binary()))


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    """The segment is the decode node's own."""
    ticket: Ticket = draw(build_dataclass(Ticket))
    segment = dataclasses.replace(ticket.segment, incarnation=ticket.decode_peer.incarnation)
    return dataclasses.replace(ticket, segment=segment)


token_logprobs = st.builds(
    TokenLogprobs, float32s, st.lists(st.tuples(counts, float32s), max_size=3).map(tuple)
)
SPECIAL: dict[Any, Callable[[], st.SearchStrategy[Any]]] = {
    AttemptSpec: attempt_specs,
    Ticket: tickets,
    BatonError: lambda: errors,
    TokenLogprobs: lambda: token_logprobs,
    Mapping[str, int]: lambda: st.fixed_dictionaries(dict.fromkeys(LEDGER_STATES, counts)),
    Mapping[str, float]: lambda: st.dictionaries(st.text(), st.floats(allow_nan=False)),
    bool: st.booleans,
    int: lambda: counts,
    float: lambda: seconds,
    str: st.text,
    NoneType: st.none,
}


def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that a message has as a field."""
    if kind in SPECIAL:
        return SPECIAL[kind]()
    if hasattr(kind, "__supertype__"):  # a NewType
        return strategy_of(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return st.builds(kind, *map(strategy_of, get_type_hints(kind).values()))
    if dataclasses.is_dataclass(kind):
        return build_dataclass(kind)
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*map(strategy_of, get_args(kind)))
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        if others == [...]:
            return st.lists(strategy_of(first), max_size=3).map(tuple)
        return st.tuples(strategy_of(first), *map(strategy_of, others))
    return st.sampled_from(kind)  # an Enum


def build_dataclass(kind: Any) -> st.SearchStrategy[Any]:
    """Every field is drawn, also those with defaults: one that is not sent would be noticed."""
    hints = get_type_hints(kind)
    fields = {
        field.name: strategy_of(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.name != "others"  # of an explanation: choices have no choices of their own
    }
    for name in fields.keys() & {"block_hashes", "inserted", "evicted"}:
        fields[name] = hashes
    return st.builds(kind, **fields)


def comparable(value: Any) -> Any:
    """Errors are equal by what is sent of them."""
    if isinstance(value, BatonError):
        return type(value), value.message, value.param
    if dataclasses.is_dataclass(value):
        return type(value), *(
            comparable(getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    return value
