"""One request, one model: who may join while requests live, what orders carry, and whom a name
belongs to."""

from dataclasses import replace
from typing import Any

import pytest

from baton.cluster_link.messages import (
    PROTOCOL_VERSION,
    DecodeOrder,
    PoolJoinInfo,
    PrefillOrder,
    ReservationRefused,
)
from baton.errors import ConfigError, ModelMismatch, NodeLost, ServiceUnavailable
from baton.kv.kv_layout import KVLayout
from baton.models.file_digests import ModelFileDigests
from baton.types import FinishReason, Incarnation, NodeName, RequestId
from coordinator.core.brain import Brain
from coordinator.core.common.effects import FinishedResult
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.join_checks import ServedModel
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.policies import LeastLoadedPolicy
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import (
    DECODE,
    LAYOUT,
    PREFILL,
    SILENCE,
    STALL,
    BrainHarness,
    make_join_info,
    stream_first_token,
)

OTHERS: list[dict[str, Any]] = [
    {"model_digest": "cd"},
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"implementation": "native"},
    {"layout": KVLayout(2, 1, 4, 16, "bfloat16")},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
@pytest.mark.parametrize("name", ["d0", "d1"])
def test_other_model_is_rejected_while_placed_request_lives(
    name: str, other: dict[str, Any]
) -> None:
    """Also when its node was the last one, and under its very name."""
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
        submit.work.identity_digest
        == make_join_info("d0", DECODE, model_digest="cd").model.digest()
    )


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_unplaced_requests_do_not_bind_model(other: dict[str, Any]) -> None:
    """Clients go on asking while nobody serves, and the warm-up request waits too: all of them end
    with 503."""
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
    orders = [
        *world.messages_to(p0, PrefillOrder),
        *world.messages_to(d0, DecodeOrder),
        *world.messages_to(d1, DecodeOrder),
    ]
    assert len(orders) == 4
    assert {order.work.identity_digest for order in orders} == {
        make_join_info("d0", DECODE).model.digest()
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


# the coordinator's own model

FILES = ModelFileDigests(config_digest="c0", tokenizer_digest="t0", weights_digest="w0")
SERVED = ServedModel("model", FILES)


def brain_of(served: ServedModel) -> Brain:
    return Brain(
        NodeRegistry(SILENCE, STALL, served),
        LeastLoadedPolicy(),
        BrainSettings(mode="colocated", max_queue=8, max_attempts=3, reserve_timeout=STALL),
    )


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("engine", {"engine": "paced"}),
        ("config_digest", {"files": replace(FILES, config_digest="c1")}),
        ("tokenizer_digest", {"files": replace(FILES, tokenizer_digest="t1")}),
        ("weights_digest", {"files": replace(FILES, weights_digest="w1")}),
    ],
)
def test_node_with_other_model_than_coordinator_is_rejected(
    field: str, changes: dict[str, Any]
) -> None:
    brain = brain_of(SERVED)
    info = replace(make_join_info("d0", DECODE, engine="model", files=FILES), **changes)
    with pytest.raises(
        ConfigError, match=rf"has {field} .*the coordinator's --model has .*: start"
    ) as caught:
        brain.join_node(info, Incarnation("d0#1"), 0.0)
    assert caught.value.param == field
    assert brain.counters.joins == {"refused": 1}


@pytest.mark.parametrize(
    ("served", "files"),
    [
        (SERVED, FILES),
        (
            SERVED,
            ModelFileDigests(config_digest="c0"),
        ),  # no tokenizer files beside the node's weights
        (
            ServedModel("model", ModelFileDigests("c0", "t0")),
            FILES,
        ),  # no weights beside the coordinator's tokenizer
        (ServedModel(), ModelFileDigests("c9", "t9", "w9")),  # a coordinator without a model
    ],
)
def test_unknown_model_facts_are_not_compared(served: ServedModel, files: ModelFileDigests) -> None:
    brain = brain_of(served)
    brain.join_node(
        make_join_info("d0", DECODE, engine="model", files=files), Incarnation("d0#1"), 0.0
    )
    assert brain.counters.joins == {"joined": 1}


# names


def test_second_process_of_name_is_rejected_while_first_is_alive(world: BrainHarness) -> None:
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE, pid=41, process="first")
    request = world.submit()
    world.advance(2.0, beating=False)
    with pytest.raises(
        ConfigError, match=r"'d0' is in use by process 41 of host 'h'.*--name"
    ) as caught:
        world.join_node("d0", DECODE, process="second")
    assert caught.value.retry_after == pytest.approx(SILENCE - 2.0)
    assert world.brain.counters.joins["refused"] == 1
    assert world.last_attempt_key(d0) == (request, 1, 0)
    assert world.brain.get_request_state(request) is RequestState.PLACED


def test_silent_process_holds_name_no_longer_than_silence_timeout(world: BrainHarness) -> None:
    """A half-open stream does not keep a restart out."""
    world.join_node("d0", DECODE, process="first")
    with pytest.raises(ConfigError) as caught:
        world.join_node("d0", DECODE, process="second")
    assert caught.value.retry_after is not None
    world.advance(caught.value.retry_after, beating=False)
    world.join_node("d0", DECODE, process="second")


def test_restart_after_predecessor_left_joins_at_once(world: BrainHarness) -> None:
    world.lose_node(world.join_node("d0", DECODE, process="first"))
    world.join_node("d0", DECODE, process="second")


def test_same_process_replaces_its_incarnation(world: BrainHarness) -> None:
    old = world.join_node("d0", DECODE, process="first")
    new = world.join_node("d0", DECODE, process="first", rejoining=old)
    assert list(world.brain.node_registry.nodes) == [new]


def make_pool(process: str) -> PoolJoinInfo:
    where = NodeName("pool-0"), "host-a", "127.0.0.1:1", 7
    return PoolJoinInfo(PROTOCOL_VERSION, *where, "ab", LAYOUT, 100, process)


def test_pool_names_are_exclusive_too(world: BrainHarness) -> None:
    world.brain.join_pool(make_pool("first"), Incarnation("1"), world.now)
    with pytest.raises(ConfigError, match=r"'pool-0' is in use by process 7") as caught:
        world.brain.join_pool(make_pool("second"), Incarnation("2"), world.now)
    assert caught.value.retry_after == SILENCE
    world.brain.join_pool(make_pool("first"), Incarnation("3"), world.now)
    world.brain.remove_member(Incarnation("3"), NodeLost("its stream ended"), world.now)
    world.brain.join_pool(make_pool("second"), Incarnation("4"), world.now)


def test_join_without_process_id_is_rejected(world: BrainHarness) -> None:
    """Any two of them would take each other's name."""
    with pytest.raises(ConfigError, match="'d0' has process ''") as caught:
        world.join_node("d0", DECODE, process="")
    assert caught.value.param == "process"
    with pytest.raises(ConfigError, match="'pool-0' has process ''"):
        world.brain.join_pool(make_pool(process=""), Incarnation("1"), world.now)
    assert world.brain.counters.joins == {"refused": 2}


# lengths


def test_length_bounds_follow_largest_decode_node_and_outlive_it(world: BrainHarness) -> None:
    """Prefill nodes set none: what they cannot hold is computed where it is decoded."""
    with pytest.raises(ServiceUnavailable):
        world.brain.get_model_bounds()
    nodes = [
        world.join_node("p0", PREFILL, max_model_len=100),
        world.join_node("d0", DECODE, num_blocks=20),
    ]
    assert (
        world.brain.get_model_bounds().max_context,
        world.brain.get_model_bounds().current_max_context,
    ) == (256, 256)
    world.join_node("d1", DECODE, num_blocks=5)
    world.join_node("p1", PREFILL, max_model_len=40)
    assert world.brain.get_model_bounds().max_context == 256
    world.lose_node(nodes[1])
    assert (
        world.brain.get_model_bounds().max_context,
        world.brain.get_model_bounds().current_max_context,
    ) == (256, 80)
    assert (
        world.brain.get_model_bounds().max_output_tokens(30) == 50
    )  # what a request that names no length asks for
    world.advance(601.0)
    assert world.brain.get_model_bounds().max_context == 80
    for node in list(world.brain.node_registry.nodes):
        world.lose_node(node)
    world.advance(601.0)
    assert world.brain.get_model_bounds().max_context == 80  # the last ones' while nobody is here


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "auto"])
def test_requests_are_placed_on_nodes_that_can_hold_them(mode: str) -> None:
    world = BrainHarness(mode=mode)
    small = [
        world.join_node("p0", PREFILL, max_model_len=64),
        world.join_node("d0", DECODE, num_blocks=4),
    ]
    large = [world.join_node("p1", PREFILL), world.join_node("d1", DECODE)]
    for _ in range(4):
        request = world.submit(prompt=60, max_tokens=20)
        assert world.brain.get_request_state(request) is RequestState.PLACED
        world.cancel(request)
    decode = large[1]
    assert not world.messages_to(small[1], DecodeOrder)
    assert len(world.messages_to(decode, DecodeOrder)) == 4
    world.submit(prompt=100, max_tokens=5)
    assert not any(
        len(order.work.request.prompt_token_ids) == 100
        for order in world.messages_to(small[0], PrefillOrder)
    )


def test_request_no_node_can_hold_is_parked_and_ends_with_503() -> None:
    world = BrainHarness(mode="colocated", max_queue=200)
    d0, small = world.join_node("d0", DECODE), world.join_node("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20, timeout=20.0)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    world.lose_node(d0)
    assert world.brain.get_request_state(long) is RequestState.QUEUED
    for _ in range(80):  # more than may pass one that waits for room
        short = world.submit(prompt=8, max_tokens=1)
        world.report_token(small, world.last_attempt_key(small), 0, finish=FinishReason.LENGTH)
        assert isinstance(world.end_event(short).result, FinishedResult)
    world.advance(20.0)
    error = world.end_error(long)
    assert isinstance(error, ServiceUnavailable)
    assert "can hold its 120 tokens, the largest holds 64" in error.message


def full_of_long_requests(**settings: Any) -> tuple[BrainHarness, Incarnation, list[RequestId]]:
    """As many as the queue may have wait for a larger node than the one that is here."""
    world = BrainHarness(mode="colocated", max_queue=8, **settings)
    large, small = (
        world.join_node("d0", DECODE, max_num_seqs=8),
        world.join_node("d1", DECODE, num_blocks=4),
    )
    long = [world.submit(prompt=100, max_tokens=20, timeout=600.0) for _ in range(8)]
    world.lose_node(large)
    assert {world.brain.get_request_state(request) for request in long} == {RequestState.QUEUED}
    return world, small, long


def test_parked_oversized_requests_take_no_queue_place() -> None:
    world, small, long = full_of_long_requests(max_queue_tokens=800)
    assert (
        world.brain.queued_requests,
        world.brain.running_requests,
        world.brain.queued_tokens,
    ) == (8, 0, 0)
    short = world.submit(prompt=8, max_tokens=1)
    assert world.last_attempt_key(small) == (short, 1, 0)
    world.report_token(small, world.last_attempt_key(small), 0, finish=FinishReason.LENGTH)
    back = world.join_node("d0", DECODE, max_num_seqs=8, process="restarted")
    assert world.last_attempt_key(back).request_id in long
    assert world.brain.queued_tokens > 0
    for request in long:
        world.cancel(request)
    assert (world.brain.queued_requests, world.brain.queued_tokens) == (0, 0)


def test_parked_oversized_requests_are_bounded() -> None:
    world, _, long = full_of_long_requests(max_queue_tokens=800)
    one_more = world.end_error(world.submit(prompt=100, max_tokens=20))
    assert isinstance(one_more, ServiceUnavailable)
    assert one_more.retry_after
    assert "8 requests (--max-queue) already wait for a larger one" in one_more.message
    world.cancel(long.pop())
    longer = world.end_error(world.submit(prompt=150, max_tokens=20))
    assert "700 prompt tokens (--max-queue-tokens) already wait" in longer.message
    assert not any(world.end_events(request) for request in long)


def test_parked_request_resumes_when_larger_node_joins() -> None:
    world = BrainHarness(mode="colocated")
    d0 = world.join_node("d0", DECODE)
    world.join_node("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20)
    world.report_token(d0, world.last_attempt_key(d0), 0)
    world.lose_node(d0)
    back = world.join_node("d0", DECODE, process="restarted")
    assert world.last_attempt_key(back) == (long, 2, 0)
    assert world.messages_to(back, DecodeOrder)[-1].work.emitted_token_ids == (7,)


def test_new_request_for_restarting_node_gets_503_not_400() -> None:
    world = BrainHarness(mode="colocated")
    world.lose_node(world.join_node("d0", DECODE))
    world.join_node("d1", DECODE, num_blocks=4)
    request = world.submit(prompt=100, max_tokens=20)
    world.advance(1.1)
    error = world.end_error(request)
    assert isinstance(error, ServiceUnavailable)
    assert "the largest holds 64" in error.message


def test_refusal_for_length_is_not_retried_on_same_node(world: BrainHarness) -> None:
    """The node's own check, should the books be wrong: the request waits for another node."""
    world.join_node("p0", PREFILL)
    d0 = world.join_node("d0", DECODE)
    request = world.submit()
    world.send_from_node(
        d0, ReservationRefused(world.last_attempt_key(d0), needed_blocks=33, free_blocks=32)
    )
    for _ in range(3):
        world.send_heartbeat(d0)
    assert len(world.messages_to(d0, DecodeOrder)) == 1
    d1 = world.join_node("d1", DECODE)
    assert world.last_attempt_key(d1) == (request, 2, 0)
