"""One request, one model: who may join while requests live, what orders carry, and whom a name belongs to."""

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import ConfigError, NodeGone, Unavailable, WrongModel
from baton.kv_layout import KVLayout
from baton.model_files import ModelFiles
from baton.types import FinishReason, Incarnation, NodeName, RequestId
from baton.wire import PROTOCOL_VERSION
from coordinator.core import messages as m
from coordinator.core.brain import Brain
from coordinator.core.identity import CoordinatorModel
from coordinator.core.pools import PoolInfo
from coordinator.core.record import RequestState
from coordinator.core.registry import Registry
from coordinator.core.settings import Settings
from coordinator.core.simple_policies import LeastLoaded
from tests.unit.coordinator_core.world import DECODE, LAYOUT, PREFILL, SILENCE, STALL, World, join_info, stream_one

OTHERS: list[dict[str, Any]] = [
    {"model_digest": "cd"},
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"implementation": "native"},
    {"layout": KVLayout(2, 1, 4, 16, "bfloat16")},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
@pytest.mark.parametrize("name", ["d0", "d1"])
def test_no_other_model_joins_while_a_request_lives(name: str, other: dict[str, Any]) -> None:
    """Also when its node was the last one, and under its very name."""
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    request = world.submit(max_tokens=4)
    world.token(d0, world.key(d0), 0)
    world.gone(d0)
    with pytest.raises(ConfigError, match=r"1 requests of that model have not ended.*--request-timeout") as caught:
        world.join(name, DECODE, process="new", **other)
    assert caught.value.param == next(iter(other)).replace("layout", "layout.dtype")
    assert caught.value.retry_after, "the request will have ended sometime, so the node tries again"
    assert world.brain.counters.joins["refused"] == 1
    back = world.join(name, DECODE, process="new")
    assert world.key(back) == (request, 2, 0)


def test_another_model_may_join_once_nobody_is_bound_to_the_old_one() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    request = world.submit(timeout=20.0)
    world.gone(d0)
    world.cancel(request)
    d0 = world.join("d0", DECODE, model_digest="cd", process="new")
    second = world.submit()
    (submit,) = world.sent(d0, m.Submit)
    assert submit.work.key.request == second
    assert submit.work.model == join_info("d0", DECODE, model_digest="cd").model.digest()


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_requests_that_were_never_placed_do_not_keep_another_model_out(other: dict[str, Any]) -> None:
    """Clients go on asking while nobody serves, and the warm-up request waits too: all of them end with 503."""
    world = World(mode="colocated")
    world.gone(world.join("d0", DECODE))
    warm_up = world.submit(timeout=600.0, internal=True)
    waiting = [world.submit(timeout=600.0) for _ in range(3)]
    d1 = world.join("d1", DECODE, **other)
    for request in [warm_up, *waiting]:
        error = world.error(request)
        assert isinstance(error, Unavailable)
        assert error.retry_after
    assert not world.sent(d1, m.Submit)
    second = world.submit()
    assert world.key(d1) == (second, 1, 0)


def test_a_placed_request_of_our_own_does_not_keep_another_model_out() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    warm_up = world.submit(timeout=600.0, internal=True)
    assert world.key(d0) == (warm_up, 1, 0)
    world.gone(d0)
    d0 = world.join("d0", DECODE, process="new", dtype="bfloat16")
    assert isinstance(world.error(warm_up), Unavailable)
    assert not world.sent(d0, m.Submit)


def test_a_node_of_the_same_model_ends_no_request_that_waits() -> None:
    world = World(mode="colocated")
    world.gone(world.join("d0", DECODE))
    waiting = world.submit()
    assert world.key(world.join("d1", DECODE, num_blocks=16)) == (waiting, 1, 0)


def test_every_order_of_a_request_carries_the_model_that_it_was_admitted_under(world: World) -> None:
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    world.submit()
    stream_one(world, p0, d0)
    world.gone(d0)
    d1 = world.join("d1", DECODE)
    orders = [*world.sent(p0, m.Prefill), *world.sent(d0, m.Submit), *world.sent(d1, m.Submit)]
    assert len(orders) == 4
    assert {order.work.model for order in orders} == {join_info("d0", DECODE).model.digest()}


def test_a_node_that_serves_another_model_after_all_is_avoided(world: World) -> None:
    world.join("p0", PREFILL)
    nodes = [world.join("d0", DECODE), world.join("d1", DECODE)]
    request = world.submit()
    first = next(node for node in nodes if world.sent(node, m.Submit))
    (other,) = (node for node in nodes if node != first)
    world.fail(first, world.key(first), WrongModel("bound to model ab, this node serves cd"))
    assert world.key(other) == (request, 2, 0)


# the coordinator's own model

FILES = ModelFiles(config="c0", tokenizer="t0", weights="w0")
SERVED = CoordinatorModel("model", FILES)


def brain_of(served: CoordinatorModel) -> Brain:
    return Brain(Registry(SILENCE, STALL, served), LeastLoaded(), Settings("colocated", 8, 3, STALL))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("engine", {"engine": "paced"}),
        ("config_digest", {"files": replace(FILES, config="c1")}),
        ("tokenizer_digest", {"files": replace(FILES, tokenizer="t1")}),
        ("weights_digest", {"files": replace(FILES, weights="w1")}),
    ],
)
def test_a_node_of_another_model_than_the_coordinator_is_refused(field: str, changes: dict[str, Any]) -> None:
    brain = brain_of(SERVED)
    info = replace(join_info("d0", DECODE, engine="model", files=FILES), **changes)
    with pytest.raises(ConfigError, match=rf"has {field} .*the coordinator's --model has .*: start") as caught:
        brain.join(info, Incarnation("d0#1"), 0.0)
    assert caught.value.param == field
    assert brain.counters.joins == {"refused": 1}


@pytest.mark.parametrize(
    ("served", "files"),
    [
        (SERVED, FILES),
        (SERVED, ModelFiles(config="c0")),  # no tokenizer files beside the node's weights
        (CoordinatorModel("model", ModelFiles("c0", "t0")), FILES),  # no weights beside the coordinator's tokenizer
        (CoordinatorModel(), ModelFiles("c9", "t9", "w9")),  # a coordinator without a model
    ],
)
def test_what_one_side_does_not_have_is_not_compared(served: CoordinatorModel, files: ModelFiles) -> None:
    brain = brain_of(served)
    brain.join(join_info("d0", DECODE, engine="model", files=files), Incarnation("d0#1"), 0.0)
    assert brain.counters.joins == {"joined": 1}


# names


def test_a_second_process_of_a_name_is_refused_while_the_first_is_heard(world: World) -> None:
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE, pid=41, process="first")
    request = world.submit()
    world.advance(2.0, beating=False)
    with pytest.raises(ConfigError, match=r"'d0' is in use by process 41 of host 'h'.*--name") as caught:
        world.join("d0", DECODE, process="second")
    assert caught.value.retry_after == pytest.approx(SILENCE - 2.0)
    assert world.brain.counters.joins["refused"] == 1
    assert world.key(d0) == (request, 1, 0)
    assert world.brain.state(request) is RequestState.PLACED


def test_a_process_that_was_heard_no_more_holds_its_name_no_longer_than_silence(world: World) -> None:
    """A half-open stream does not keep a restart out."""
    world.join("d0", DECODE, process="first")
    with pytest.raises(ConfigError) as caught:
        world.join("d0", DECODE, process="second")
    assert caught.value.retry_after is not None
    world.advance(caught.value.retry_after, beating=False)
    world.join("d0", DECODE, process="second")


def test_a_restart_whose_predecessor_is_gone_joins_at_once(world: World) -> None:
    world.gone(world.join("d0", DECODE, process="first"))
    world.join("d0", DECODE, process="second")


def test_the_same_process_takes_its_own_place(world: World) -> None:
    old = world.join("d0", DECODE, process="first")
    new = world.join("d0", DECODE, process="first", rejoining=old)
    assert list(world.brain.registry.nodes) == [new]


def test_pools_have_names_of_their_own_too(world: World) -> None:
    def pool(process: str) -> PoolInfo:
        where = NodeName("pool-0"), "host-a", "127.0.0.1:1", 7
        return PoolInfo(PROTOCOL_VERSION, *where, "ab", LAYOUT, 100, process)

    world.brain.join_pool(pool("first"), Incarnation("1"), world.now)
    with pytest.raises(ConfigError, match=r"'pool-0' is in use by process 7") as caught:
        world.brain.join_pool(pool("second"), Incarnation("2"), world.now)
    assert caught.value.retry_after == SILENCE
    world.brain.join_pool(pool("first"), Incarnation("3"), world.now)
    world.brain.node_gone(Incarnation("3"), NodeGone("its stream ended"), world.now)
    world.brain.join_pool(pool("second"), Incarnation("4"), world.now)


def test_who_names_no_process_is_no_member(world: World) -> None:
    """Any two of them would take each other's name."""
    with pytest.raises(ConfigError, match="'d0' has process ''") as caught:
        world.join("d0", DECODE, process="")
    assert caught.value.param == "process"
    pool = PoolInfo(PROTOCOL_VERSION, NodeName("pool-0"), "host-a", "127.0.0.1:1", 7, "ab", LAYOUT, 100)
    with pytest.raises(ConfigError, match="'pool-0' has process ''"):
        world.brain.join_pool(pool, Incarnation("1"), world.now)
    assert world.brain.counters.joins == {"refused": 2}


# lengths


def test_bounds_are_those_of_the_largest_decode_node_and_outlive_it(world: World) -> None:
    """Prefill nodes set none: what they cannot hold is computed where it is decoded."""
    with pytest.raises(Unavailable):
        world.brain.bounds()
    nodes = [world.join("p0", PREFILL, max_model_len=100), world.join("d0", DECODE, num_blocks=20)]
    assert (world.brain.bounds().max_context, world.brain.bounds().present_context) == (256, 256)
    world.join("d1", DECODE, num_blocks=5)
    world.join("p1", PREFILL, max_model_len=40)
    assert world.brain.bounds().max_context == 256
    world.gone(nodes[1])
    assert (world.brain.bounds().max_context, world.brain.bounds().present_context) == (256, 80)
    assert world.brain.bounds().output_room(30) == 50  # what a request that names no length asks for
    world.advance(601.0)
    assert world.brain.bounds().max_context == 80
    for node in list(world.brain.registry.nodes):
        world.gone(node)
    world.advance(601.0)
    assert world.brain.bounds().max_context == 80  # the last ones' while nobody is here


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "auto"])
def test_requests_are_placed_on_nodes_that_can_hold_them(mode: str) -> None:
    world = World(mode=mode)
    small = [world.join("p0", PREFILL, max_model_len=64), world.join("d0", DECODE, num_blocks=4)]
    large = [world.join("p1", PREFILL), world.join("d1", DECODE)]
    for _ in range(4):
        request = world.submit(prompt=60, max_tokens=20)
        assert world.brain.state(request) is RequestState.PLACED
        world.cancel(request)
    decode = large[1]
    assert not world.sent(small[1], m.Submit)
    assert len(world.sent(decode, m.Submit)) == 4
    world.submit(prompt=100, max_tokens=5)
    assert not any(len(order.work.request.prompt) == 100 for order in world.sent(small[0], m.Prefill))


def test_a_request_that_nobody_can_hold_any_more_waits_aside_and_ends_with_503() -> None:
    world = World(mode="colocated", max_queue=200)
    d0, small = world.join("d0", DECODE), world.join("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20, timeout=20.0)
    world.token(d0, world.key(d0), 0)
    world.gone(d0)
    assert world.brain.state(long) is RequestState.QUEUED
    for _ in range(80):  # more than may pass one that waits for room
        short = world.submit(prompt=8, max_tokens=1)
        world.token(small, world.key(small), 0, finish=FinishReason.LENGTH)
        assert isinstance(world.end(short).result, m.Finished)
    world.advance(20.0)
    error = world.error(long)
    assert isinstance(error, Unavailable)
    assert "can hold its 120 tokens, the largest holds 64" in error.message


def full_of_long_requests(**settings: Any) -> tuple[World, Incarnation, list[RequestId]]:
    """As many as the queue may have wait for a larger node than the one that is here."""
    world = World(mode="colocated", max_queue=8, **settings)
    large, small = world.join("d0", DECODE, max_num_seqs=8), world.join("d1", DECODE, num_blocks=4)
    long = [world.submit(prompt=100, max_tokens=20, timeout=600.0) for _ in range(8)]
    world.gone(large)
    assert {world.brain.state(request) for request in long} == {RequestState.QUEUED}
    return world, small, long


def test_requests_that_wait_for_a_larger_node_take_nobodys_place_in_the_queue() -> None:
    world, small, long = full_of_long_requests(max_queue_tokens=800)
    assert (world.brain.queued, world.brain.running, world.brain.queued_tokens) == (8, 0, 0)
    short = world.submit(prompt=8, max_tokens=1)
    assert world.key(small) == (short, 1, 0)
    world.token(small, world.key(small), 0, finish=FinishReason.LENGTH)
    back = world.join("d0", DECODE, max_num_seqs=8, process="restarted")
    assert world.key(back).request in long
    assert world.brain.queued_tokens > 0
    for request in long:
        world.cancel(request)
    assert (world.brain.queued, world.brain.queued_tokens) == (0, 0)


def test_no_more_of_them_wait_than_the_queue_may_have() -> None:
    world, _, long = full_of_long_requests(max_queue_tokens=800)
    one_more = world.error(world.submit(prompt=100, max_tokens=20))
    assert isinstance(one_more, Unavailable)
    assert one_more.retry_after
    assert "8 requests (--max-queue) already wait for a larger one" in one_more.message
    world.cancel(long.pop())
    longer = world.error(world.submit(prompt=150, max_tokens=20))
    assert "700 prompt tokens (--max-queue-tokens) already wait" in longer.message
    assert not any(world.ends(request) for request in long)


def test_it_goes_on_when_a_node_comes_that_can_hold_it() -> None:
    world = World(mode="colocated")
    d0 = world.join("d0", DECODE)
    world.join("d1", DECODE, num_blocks=4)
    long = world.submit(prompt=100, max_tokens=20)
    world.token(d0, world.key(d0), 0)
    world.gone(d0)
    back = world.join("d0", DECODE, process="restarted")
    assert world.key(back) == (long, 2, 0)
    assert world.sent(back, m.Submit)[-1].work.emitted == (7,)


def test_a_new_request_for_a_node_that_restarts_is_told_503_and_not_400() -> None:
    world = World(mode="colocated")
    world.gone(world.join("d0", DECODE))
    world.join("d1", DECODE, num_blocks=4)
    request = world.submit(prompt=100, max_tokens=20)
    world.advance(1.1)
    error = world.error(request)
    assert isinstance(error, Unavailable)
    assert "the largest holds 64" in error.message


def test_a_refusal_for_length_is_not_repeated(world: World) -> None:
    """The node's own check, should the books be wrong: the request waits for another node."""
    world.join("p0", PREFILL)
    d0 = world.join("d0", DECODE)
    request = world.submit()
    world.say(d0, m.Refused(world.key(d0), needed=33, free=32))
    for _ in range(3):
        world.beat(d0)
    assert len(world.sent(d0, m.Submit)) == 1
    d1 = world.join("d1", DECODE)
    assert world.key(d1) == (request, 2, 0)
