"""A request is bound to one model: which nodes may join while it lives, and what orders carry."""

from typing import Any

import pytest

from baton.cluster_link.messages import (
    DecodeOrder,
    PrefillOrder,
)
from baton.errors import ConfigError, ModelMismatch, ServiceUnavailable
from baton.kv.blocks import KVLayout
from simulator.node_messages import make_join_info
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    PREFILL,
    BrainHarness,
    stream_first_token,
)

OTHERS: list[dict[str, Any]] = [
    {"model_digest": "cd"},
    {"dtype": "bfloat16"},
    {"quantization": "fp8"},
    {"implementation": "native"},
    {"layout": KVLayout(2, 1, 4, 16, "bfloat16")},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
@pytest.mark.parametrize("name", ["d0", "d1"])
def test_other_model_is_rejected_while_placed_request_lives(
    name: str, other: dict[str, Any]
) -> None:
    """Even if its node was the last one, and under the same name."""
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    request = world.submit(max_tokens=4)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    world.lose_node(d0)
    with pytest.raises(
        ConfigError, match=r"1 requests of that model have not ended.*--request-timeout"
    ) as caught:
        world.join_node(name, DECODE, process="new", **other)
    assert caught.value.param == next(iter(other)).replace("layout", "layout.dtype")
    assert caught.value.retry_after, "the request will have ended sometime, so the node tries again"
    assert world.brain.counters.joins["refused"] == 1
    back = world.join_node(name, DECODE, process="new")
    assert world.last_attempt_key(back) == (request, 2, 0)


def test_other_model_may_join_once_no_request_is_bound() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    request = world.submit(timeout=20.0)
    world.lose_node(d0)
    world.cancel(request)
    d0 = world.join_node("d0", DECODE, model_digest="cd", process="new")
    second = world.submit()
    (submit,) = world.messages_to(d0, DecodeOrder)
    assert submit.work.key.request_id == second
    assert (
        submit.work.identity_digest == make_join_info("d0", DECODE, model_digest="cd").model.digest
    )


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_unplaced_requests_do_not_bind_model(other: dict[str, Any]) -> None:
    """Requests and the warm-up request that wait while nobody serves all end with 503."""
    world = BrainHarness(mode="colocated")
    world.lose_node(world.join_node("d0", DECODE))
    warm_up = world.submit(timeout=600.0, internal=True)
    waiting = [world.submit(timeout=600.0) for _ in range(3)]
    d1 = world.join_node("d1", DECODE, **other)
    for request in [warm_up, *waiting]:
        error = world.end_error(request)
        assert isinstance(error, ServiceUnavailable)
        assert error.retry_after
    assert not world.messages_to(d1, DecodeOrder)
    second = world.submit()
    assert world.last_attempt_key(d1) == (second, 1, 0)


def test_internal_requests_do_not_bind_model() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    warm_up = world.submit(timeout=600.0, internal=True)
    assert world.last_attempt_key(d0) == (warm_up, 1, 0)
    world.lose_node(d0)
    d0 = world.join_node("d0", DECODE, process="new", dtype="bfloat16")
    assert isinstance(world.end_error(warm_up), ServiceUnavailable)
    assert not world.messages_to(d0, DecodeOrder)


def test_node_of_same_model_ends_no_waiting_request() -> None:
    world = BrainHarness(mode="colocated")
    world.lose_node(world.join_node("d0", DECODE))
    waiting = world.submit()
    assert world.last_attempt_key(world.join_node("d1", DECODE, num_blocks=16)) == (waiting, 1, 0)


def test_node_orders_carry_model_digest_of_admission(world: BrainHarness) -> None:
    p0, d0 = world.join_node("p0", PREFILL), world.join_node("d0", DECODE)
    world.submit()
    stream_first_token(world, p0, d0)
    world.lose_node(d0)
    d1 = world.join_node("d1", DECODE)
    orders: list[PrefillOrder | DecodeOrder] = [
        *world.messages_to(p0, PrefillOrder),
        *world.messages_to(d0, DecodeOrder),
        *world.messages_to(d1, DecodeOrder),
    ]
    assert len(orders) == 4
    assert {order.work.identity_digest for order in orders} == {
        make_join_info("d0", DECODE).model.digest
    }


def test_node_that_answers_wrong_model_is_avoided(world: BrainHarness) -> None:
    world.join_node("p0", PREFILL)
    nodes = [world.join_node("d0", DECODE), world.join_node("d1", DECODE)]
    request = world.submit()
    first = next(node for node in nodes if world.messages_to(node, DecodeOrder))
    (other,) = (node for node in nodes if node != first)
    world.report_failure(
        first,
        world.last_attempt_key(first),
        ModelMismatch("bound to model ab, this node serves cd"),
    )
    assert world.last_attempt_key(other) == (request, 2, 0)
