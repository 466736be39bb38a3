"""Every message of the node link survives the wire, whatever is in it, and every one has both
directions."""

import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import Phase, find, given, settings
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
from baton.cluster_link.report_types import DeviceReport, NodeStats
from baton.pb import cluster_pb2 as pb
from baton.types import (
    AttemptKey,
    Incarnation,
    RequestId,
)
from tests.unit.baton.cluster_link.message_strategies import comparable, strategy_of

ORDERS = (*get_args(NodeOrder), *get_args(LinkControl))
REPORTS = (*get_args(NodeReport), LedgerReport)
JOINS = (JoinInfo, PoolJoinInfo)


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
    """Some value. It is not made smaller, which would take long."""
    once = settings(phases=[Phase.generate], database=None)
    return find(strategy_of(kind), lambda _: True, settings=once)


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


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["mfu", "mbu"])
def test_shares_of_peak_rates_are_checked(name: str, value: float) -> None:
    report = Heartbeat(NodeStats(device=DeviceReport(**{name: value})))  # type: ignore[arg-type]
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
