"""What a tenant does not pay for: what was never begun for it."""

import pytest

from baton.errors import Overloaded, Unavailable
from coordinator.core.requests import UNSERVED_PATIENCE
from coordinator.core.tenants import Tenant, Tenants
from tests.unit.coordinator_core.world import DECODE, PREFILL, World

LIMITED = Tenant("a", requests_per_second=0.1, request_burst=2.0, tokens_per_second=1.0, token_burst=100.0)
PROMPT = 80


def limited() -> tuple[World, Tenants]:
    tenants = Tenants(tenants={LIMITED.name: LIMITED})
    world = World(max_queue=64)
    world.brain.reload_tenants(tenants, world.now)
    return world, tenants


def test_requests_that_no_node_could_serve_cost_their_tenant_nothing() -> None:
    world, tenants = limited()
    standing = tenants.standing(LIMITED)
    prefill = world.join("p0", PREFILL)
    for _ in range(5):
        request = world.submit(prompt=PROMPT, standing=standing)
        world.advance(UNSERVED_PATIENCE)
        assert isinstance(world.error(request), Unavailable)
    world.join("d0", DECODE)
    world.submit(prompt=PROMPT, standing=standing)
    assert world.sent(prefill, object), "served as if nothing had been"


def test_those_that_wait_to_their_deadline_cost_their_place_and_no_tokens() -> None:
    world, tenants = limited()
    standing = tenants.standing(LIMITED)
    world.join("p0", PREFILL)
    decode = world.join("d0", DECODE, max_num_seqs=1)
    world.submit(max_tokens=8)
    for _ in range(2):
        request = world.submit(prompt=PROMPT, timeout=1.0, standing=standing)
        world.advance(1.0)
        assert world.error(request).code == "deadline_exceeded"
    assert len(world.sent(decode, object)) == 1
    account = world.brain._table.admission._accounts[LIMITED.name]
    assert account.tokens is not None
    assert account.tokens.level > 0.9 * LIMITED.token_burst
    with pytest.raises(Overloaded, match="requests_per_second"):
        world.submit(prompt=PROMPT, standing=standing)


def test_what_is_given_back_is_no_more_than_was_saved_up() -> None:
    world, tenants = limited()
    world.join("p0", PREFILL)
    request = world.submit(prompt=PROMPT, standing=tenants.standing(LIMITED))
    world.advance(0.5)
    world.cancel(request)
    account = world.brain._table.admission._accounts[LIMITED.name]
    assert account.tokens is not None
    assert account.tokens.level == LIMITED.token_burst


def test_what_a_tenant_may_not_ask_is_no_demand() -> None:
    """It would be refused with any ratio: neither the advice on it nor the share within the SLO is about it."""
    world, tenants = limited()
    standing = tenants.standing(LIMITED)
    world.join("p0", PREFILL)
    world.join("d0", DECODE)
    for _ in range(2):
        world.submit(prompt=10, standing=standing)
    for _ in range(50):
        with pytest.raises(Overloaded, match="requests_per_second"):
            world.submit(prompt=10, standing=standing)
    workload = world.brain.knowledge.workload.over(60.0, world.now + 1.0)
    assert workload is not None
    assert workload.rate == pytest.approx(2.0)
    assert world.brain.pilot.service(world.now + 1.0).ended == 0
    assert world.brain.counters.rejected["overloaded", "default"] == 50


def test_what_there_is_no_room_for_is_demand() -> None:
    world = World(max_queue=1)
    world.join("p0", PREFILL)
    world.join("d0", DECODE, max_num_seqs=1)
    for _ in range(2):
        world.submit()
    for _ in range(3):
        with pytest.raises(Overloaded, match="--max-queue"):
            world.submit()
    assert world.brain.pilot.service(world.now + 1.0).ended == 3
