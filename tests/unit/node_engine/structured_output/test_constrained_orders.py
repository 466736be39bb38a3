"""Orders with a grammar wait for it, in order with the other commands of their attempts."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PeerLostNotice, SetRoleOrder
from baton.errors import BatonError, Cancelled, GrammarFailed, NodeFailed
from baton.types import (
    AttemptKey,
    AttemptSpec,
    GrammarKind,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    Role,
    SamplingParams,
    StructuredOutput,
)
from node_engine.core.node_commands import CoordinatorLost, NodeCommand, NodeJoined
from node_engine.structured_output.constrained_orders import ConstrainedOrders
from node_engine.structured_output.grammar_state import GrammarState

GRAMMAR = StructuredOutput(GrammarKind.REGEX, "a")
WRITER = PeerAddress(NodeName("p"), Incarnation("w"), "h", "tcp://h:1")
STATE = cast(GrammarState, object())


class ManualFactory:
    """A ConstraintFactory whose work a test ends."""

    def __init__(self) -> None:
        self.started: dict[AttemptKey, Future[GrammarState]] = {}

    def submit_work(self, work: AttemptSpec) -> "Future[GrammarState]":
        made = self.started[work.key] = Future()
        return made

    def counters(self) -> dict[str, float]:
        return {}


def work(name: str, grammar: StructuredOutput | None = GRAMMAR) -> AttemptSpec:
    key = AttemptKey(RequestId(name), 0, 0)
    sampling = SamplingParams(4, structured_output=grammar)
    return AttemptSpec(key, Request(key.request_id, (1, 2), sampling, 60.0))


class Gate:
    def __init__(self, timeout_seconds: float = 60.0) -> None:
        self.factory = ManualFactory()
        self.delivered: list[NodeCommand] = []
        factory: Any = self.factory
        self.orders = ConstrainedOrders(factory, self.delivered.append, timeout_seconds)

    def error(self, spec: AttemptSpec) -> BatonError:
        with pytest.raises(BatonError) as raised:
            self.orders.take_constraint(spec)
        return raised.value


async def test_an_order_waits_and_the_others_pass() -> None:
    gate, slow, plain = Gate(), DecodeOrder(work("a"), None), DecodeOrder(work("b", None), None)
    cancel = CancelOrder(AttemptKey(RequestId("c"), 0, 0), Cancelled("x"))
    for command in (slow, plain, cancel):
        gate.orders.submit_command(command)
    assert gate.delivered == [plain, cancel]
    assert gate.orders.take_constraint(plain.work) is None
    gate.factory.started[slow.work.key].set_result(STATE)
    await asyncio.sleep(0)
    assert gate.delivered == [plain, cancel, slow]
    assert gate.orders.take_constraint(slow.work) is STATE
    assert isinstance(gate.error(slow.work), GrammarFailed), "a constraint is taken once"


async def test_a_cancel_ends_the_wait_and_keeps_its_place() -> None:
    gate, order = Gate(), DecodeOrder(work("a"), None)
    cancel = CancelOrder(order.work.key, Cancelled("x"))
    gate.orders.submit_command(order)
    gate.orders.submit_command(cancel)
    assert gate.delivered == [order, cancel]
    assert isinstance(gate.error(order.work), Cancelled)
    gate.factory.started[order.work.key].set_result(STATE)  # too late
    await asyncio.sleep(0)
    assert gate.delivered == [order, cancel]


@pytest.mark.parametrize("error", [GrammarFailed("no"), RuntimeError("a defect")])
async def test_an_error_takes_the_place_of_the_constraint(error: Exception) -> None:
    gate, order = Gate(), DecodeOrder(work("a"), None)
    gate.orders.submit_command(order)
    gate.factory.started[order.work.key].set_exception(error)
    await asyncio.sleep(0)
    assert gate.delivered == [order]
    assert isinstance(gate.error(order.work), GrammarFailed)


async def test_a_grammar_that_takes_too_long_fails_the_attempt() -> None:
    gate, order = Gate(timeout_seconds=0.001), DecodeOrder(work("a"), None)
    gate.orders.submit_command(order)
    while not gate.delivered:
        await asyncio.sleep(0.001)
    assert "--grammar-timeout" in gate.error(order.work).message


@pytest.mark.parametrize(
    "command",
    [
        NodeJoined(Incarnation("i")),
        CoordinatorLost(),
        PeerLostNotice(Incarnation("w")),
        SetRoleOrder(Role.PREFILL),
    ],
)
async def test_what_ends_attempts_ends_their_wait(command: NodeCommand) -> None:
    gate, order = Gate(), DecodeOrder(work("a"), WRITER)
    other = PeerLostNotice(Incarnation("another"))
    for each in (order, other, command):
        gate.orders.submit_command(each)
    assert gate.delivered == [other, order, command]
    assert gate.error(order.work).is_retryable


async def test_all_are_released_when_the_node_stops() -> None:
    gate = Gate()
    orders = [DecodeOrder(work(name), None) for name in "ab"]
    for order in orders:
        gate.orders.submit_command(order)
    gate.orders.release_all(NodeFailed("stopping"))
    assert gate.delivered == orders
    gate.orders.drop_constraint(orders[0].work.key)
    assert isinstance(gate.error(orders[0].work), GrammarFailed)
    assert isinstance(gate.error(orders[1].work), NodeFailed)


async def test_grammars_that_are_dropped_when_the_node_stops_are_no_error() -> None:
    gate, order, errors = Gate(), DecodeOrder(work("a"), None), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    gate.orders.submit_command(order)
    gate.orders.release_all(NodeFailed("stopping"))
    assert gate.factory.started[order.work.key].cancel()
    await asyncio.sleep(0)
    assert errors == []


async def test_attempts_of_one_request_wait_for_themselves() -> None:
    gate, first = Gate(), DecodeOrder(work("a"), None)
    key = first.work.key._replace(attempt_number=1)
    second = DecodeOrder(replace(first.work, key=key), None)
    for order in (first, second):
        gate.orders.submit_command(order)
    gate.factory.started[key].set_result(STATE)
    await asyncio.sleep(0)
    assert gate.delivered == [second]
