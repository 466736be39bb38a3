"""A name belongs to one process."""

import pytest

from baton.cluster_link.messages import (
    PROTOCOL_VERSION,
    PoolJoinInfo,
)
from baton.errors import ConfigError, NodeLost
from baton.types import Incarnation, NodeName
from coordinator.core.requests.record import RequestState
from tests.unit.coordinator.core.brain_harness import DECODE, LAYOUT, PREFILL, SILENCE, BrainHarness


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
