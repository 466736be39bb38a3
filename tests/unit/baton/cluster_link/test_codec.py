"""Every message of the node link survives the wire, whatever is in it, and every one has both
directions."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from baton.cluster_link import messages
from baton.cluster_link.codec import decode_order, decode_report, encode_order, encode_report
from baton.cluster_link.join_codec import decode_join, encode_join
from baton.cluster_link.messages import (
    DecodeStarted,
    Heartbeat,
    JoinInfo,
    LedgerReport,
    LinkControl,
    NodeOrder,
    NodeReport,
    PoolJoinInfo,
)
from baton.cluster_link.pb_conversion import LEDGER_STATES
from baton.cluster_link.report_types import NodeStats
from baton.errors import ERRORS_BY_CODE, BatonError
from baton.pb import cluster_pb2 as pb
from baton.types import (
    AttemptKey,
    AttemptSpec,
    Incarnation,
    Principal,
    Request,
    RequestId,
    SamplingParams,
    Ticket,
    TokenLogprobs,
)

ORDERS = (*get_args(NodeOrder), *get_args(LinkControl))
REPORTS = (*get_args(NodeReport), LedgerReport)
JOINS = (JoinInfo, PoolJoinInfo)

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
    ticket = draw(build_dataclass(Ticket))
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
    fields = {field.name: strategy_of(hints[field.name]) for field in dataclasses.fields(kind)}
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


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(st.data())
def test_order_round_trip(kind: type, data: st.DataObject) -> None:
    order = data.draw(strategy_of(kind))
    wire = encode_order(order).SerializeToString()
    assert comparable(decode_order(pb.CoordinatorMessage.FromString(wire))) == comparable(order)


@pytest.mark.parametrize("kind", REPORTS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(st.data())
def test_report_round_trip(kind: type, data: st.DataObject) -> None:
    report = data.draw(strategy_of(kind))
    wire = encode_report(report, Incarnation("i")).SerializeToString()
    message = pb.NodeMessage.FromString(wire)
    assert message.incarnation == "i"
    assert comparable(decode_report(message)) == comparable(report)


@pytest.mark.parametrize("kind", JOINS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(st.data())
def test_join_round_trip(kind: type, data: st.DataObject) -> None:
    join = data.draw(strategy_of(kind))
    wire = encode_join(join).SerializeToString()
    assert decode_join(pb.NodeMessage.FromString(wire).join) == join


def test_every_message_class_has_both_directions() -> None:
    """The tests above draw each of them; here, that none is left out of them."""
    stated = {
        kind
        for kind in vars(messages).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == messages.__name__
    }
    assert stated == {*ORDERS, *REPORTS, *JOINS}


def draw_one(kind: type) -> Any:
    """The simplest value, as Hypothesis sees it."""
    return find(strategy_of(kind), lambda _: True)


def test_every_message_of_the_wire_is_stated() -> None:
    def kinds(message: type[Any]) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.oneofs_by_name["message"].fields}

    encoded = [encode_order(draw_one(kind)) for kind in ORDERS]
    assert {message.WhichOneof("message") for message in encoded} == kinds(pb.CoordinatorMessage)
    sent = [encode_report(draw_one(kind), Incarnation("i")) for kind in REPORTS]
    assert {message.WhichOneof("message") for message in sent} | {"join"} == kinds(pb.NodeMessage)


def test_messages_of_a_later_version_are_none() -> None:
    assert decode_order(pb.CoordinatorMessage()) is None
    assert decode_report(pb.NodeMessage()) is None


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_durations_are_checked(value: float) -> None:
    key = AttemptKey(RequestId("r"), 1, 0)
    reports: list[Any] = [
        DecodeStarted(key, 1, 0, 0, compute_seconds=value),
        Heartbeat(NodeStats(progress_age_seconds=value)),
        Heartbeat(NodeStats(decode_step_seconds=value)),
    ]
    for report in reports:
        with pytest.raises(ValueError, match="must be finite and at least 0"):
            decode_report(encode_report(report, Incarnation("i")))


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="'both' is not a valid Role"):
        decode_order(pb.CoordinatorMessage(set_role=pb.SetRole(role="both")))


def test_unequal_lists_of_alternatives_are_refused() -> None:
    message = pb.NodeMessage()
    message.tokens.tokens.add().score.top_ids.append(1)
    with pytest.raises(ValueError, match="zip"):
        decode_report(message)
