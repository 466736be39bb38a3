"""Taking a node out of service and putting it back."""

import pytest

from baton.errors import NotFound, Unavailable
from baton.types import FinishReason, Incarnation, NodeName
from coordinator.core import messages as m
from coordinator.core.drains import MAX_NAMES, QUIET_REPORTS, Drains, Service
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

D0, D1, P0 = NodeName("d0"), NodeName("d1"), NodeName("p0")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def nodes(world: World) -> tuple[Incarnation, Incarnation, Incarnation]:
    return world.join("p0", PREFILL), world.join("d0", DECODE), world.join("d1", DECODE)


Nodes = tuple[Incarnation, Incarnation, Incarnation]


def drain(world: World, name: NodeName, timeout: float | None = None) -> None:
    world.effects += world.brain.drain_node(name, timeout, world.now)


def service(world: World, node: Incarnation) -> Service:
    return world.brain.service(world.brain.registry.nodes[node])


def stream(world: World, prefill: Incarnation, decode: Incarnation) -> None:
    key = world.key(decode)
    world.reserve(decode, key, prefill)
    world.prefill_ended(prefill, key)
    world.say(decode, m.Admitted(key, 0, 0, 20))
    world.token(decode, key, 0)


def test_it_gets_nothing_new_and_keeps_what_it_has(world: World, nodes: Nodes) -> None:
    p0, d0, d1 = nodes
    request = world.submit(max_tokens=2)
    stream(world, p0, d0)
    drain(world, D0)
    assert service(world, d0) is Service.DRAINING
    for _ in range(3):
        world.submit()
    assert (world.brain.placed_on(d0), world.brain.placed_on(d1)) == (1, 3)
    world.token(d0, world.key(d0), 1, finish=FinishReason.LENGTH)
    assert isinstance(world.end(request).result, m.Finished)
    assert world.brain.counters.replaced == {}


def test_it_is_drained_when_it_says_so_itself_and_could_know(world: World, nodes: Nodes) -> None:
    """One heartbeat may have been on its way when the last work was called off, so it takes two, and nothing held."""
    p0, d0, _ = nodes
    world.submit(max_tokens=2)
    stream(world, p0, d0)
    drain(world, D0)
    for _ in range(QUIET_REPORTS):
        world.beat(d0)
    assert service(world, d0) is Service.DRAINING
    world.token(d0, world.key(d0), 1, finish=FinishReason.LENGTH)
    world.beat(d0)
    assert service(world, d0) is Service.DRAINING
    world.beat(d0, blocks_quarantined=1)
    assert service(world, d0) is Service.DRAINING
    world.beat(d0)
    assert service(world, d0) is Service.DRAINED


def test_a_draining_prefill_node_holds_its_hand_off_to_the_commit(world: World, nodes: Nodes) -> None:
    p0, d0, _ = nodes
    world.submit()
    drain(world, P0)
    key = world.key(d0)
    world.reserve(d0, key, p0)
    assert len(world.sent(p0, m.GiveTicket)) == 1
    world.prefill_ended(p0, key)
    assert world.brain.placed_on(p0) == 1
    world.say(d0, m.Admitted(key, 0, 0, 20))
    assert world.brain.placed_on(p0) == 0
    world.beat(p0, blocks_in_use=2)  # the sender still reads its source blocks
    world.beat(p0, blocks_in_use=2)
    assert service(world, p0) is Service.DRAINING
    world.beat(p0)
    assert service(world, p0) is Service.DRAINED


def test_after_its_time_the_rest_is_placed_again_with_what_the_client_has(world: World, nodes: Nodes) -> None:
    p0, d0, d1 = nodes
    request = world.submit()
    stream(world, p0, d0)
    drain(world, D0, timeout=3.0)
    assert world.brain.next_due() == world.now + 3.0
    world.advance(2.0)
    assert world.brain.placed_on(d0) == 1
    world.advance(1.0)
    assert [cancel.reason.code for cancel in world.sent(d0, m.Cancel)] == ["drained"]
    [again] = world.sent(d1, m.Submit)
    assert again.work.emitted == (7,)
    assert world.brain.counters.replaced == {"drained": 1}
    world.reserve(d1, again.work.key, p0)
    for index in (1, 2, 3):
        world.token(d1, again.work.key, index)
    assert world.tokens(request) == [7, 7, 7, 7]
    world.advance(10.0)
    assert len(world.sent(d0, m.Cancel)) == 1


def test_draining_costs_no_attempt() -> None:
    world = World(max_attempts=1)
    p0, d0 = world.join("p0", PREFILL), world.join("d0", DECODE)
    request = world.submit()
    stream(world, p0, d0)
    drain(world, D0, timeout=0.0)
    assert world.ends(request) == []
    world.join("d1", DECODE)
    assert world.brain.running == 1


def test_a_node_that_comes_back_by_the_same_name_stays_out(world: World, nodes: Nodes) -> None:
    _, d0, d1 = nodes
    drain(world, D0)
    world.gone(d0)
    again = world.join("d0", DECODE)
    for _ in range(3):
        world.submit()
    assert (world.brain.placed_on(again), world.brain.placed_on(d1)) == (0, 3)
    world.effects += world.brain.undrain_node(D0, world.now)
    assert service(world, again) is Service.IN
    world.submit()
    assert world.brain.placed_on(again) == 1


def test_the_last_decode_node_may_be_drained_and_is_missed(world: World, nodes: Nodes) -> None:
    running = world.submit()
    for name in (D0, D1):
        drain(world, name)
    assert world.brain.missing() == "there is no decode node but drained ones (d0, d1)"
    assert world.brain.missing_prefill() == ""
    new = world.submit()
    world.advance(1.0)
    assert isinstance(world.error(new), Unavailable)
    assert world.ends(running) == []
    world.effects += world.brain.undrain_node(D0, world.now)
    assert world.brain.missing() == ""


def test_while_the_last_prefill_node_is_drained_decode_nodes_compute_prompts(world: World, nodes: Nodes) -> None:
    p0, _, _ = nodes
    world.submit()
    drain(world, P0)
    assert world.brain.missing() == ""
    assert world.brain.missing_prefill() == "there is no prefill node but drained ones (p0)"
    request = world.submit()
    told = world.brain.explain(request, world.now).attempts[0]
    assert (told.way, told.why, world.brain.placed_on(p0)) == ("local", "no_prefill_node", 1)
    world.effects += world.brain.undrain_node(P0, world.now)
    assert world.brain.missing_prefill() == ""
    world.submit()
    assert world.brain.placed_on(p0) == 2


def test_names_that_nobody_has(world: World, nodes: Nodes) -> None:
    for call in (lambda: drain(world, NodeName("x")), lambda: world.brain.undrain_node(NodeName("x"), world.now)):
        with pytest.raises(NotFound, match="no node 'x': nodes are d0, d1, p0"):
            call()
    assert world.brain.undrain_node(D1, world.now) == []
    drain(world, D0)
    world.gone(nodes[1])
    assert world.brain.undrain_node(D0, world.now) == []  # drained, and away at this moment


def test_the_names_are_bounded() -> None:
    drains = Drains()
    for number in range(MAX_NAMES):
        drains.begin(NodeName(str(number)), None)
    drains.begin(NodeName("0"), 5.0)
    with pytest.raises(Exception, match="undrain some"):
        drains.begin(NodeName("x"), None)
    assert (drains.next(), drains.due(5.0), drains.due(5.0)) == (5.0, ["0"], [])
