"""Which nodes a request that is placed again keeps away from, and which it had better go back to."""

import pytest

from baton.errors import Incomplete, OutOfMemory, Preempted
from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core import messages as m
from coordinator.core.prefix_aware import RAMP, PrefixAware
from tests.unit.coordinator_core.world import DECODE, PREFILL, World


class Pairs:
    """Two nodes of each role, and a request that the first prefill node has handed over."""

    def __init__(self) -> None:
        self.world = World(placement=PrefixAware())
        names = (("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("d1", DECODE))
        self.nodes = {name: self.world.join(name, role) for name, role in names}
        for node in self.nodes.values():
            self.world.beat(node)
        self.world.advance(2 * RAMP)
        self.request = self.world.submit(prompt=100, max_tokens=8)
        record = self.world.brain._table.records[self.request]
        assert record.attempt is not None
        self.key: AttemptKey = record.attempt.key
        assert record.attempt.prefill is not None
        assert record.attempt.decode is not None
        self.prefill: Incarnation = record.attempt.prefill
        self.decode: Incarnation = record.attempt.decode

    def hand_over(self) -> None:
        """The prompt is in the caches of both then, as the prefill node tells."""
        world, record = self.world, self.world.brain._table.records[self.request]
        world.reserve(self.decode, self.key, self.prefill)
        world.prefill_ended(self.prefill, self.key, 100)
        world.say(self.decode, m.Admitted(self.key, 0, 0, 100))
        world.handed_off(self.prefill, self.key)
        world.token(self.decode, self.key, 0)
        names = tuple(world.brain.knowledge.names_of(record.request))
        world.say(self.prefill, m.CacheSnapshot(1, names))

    def placed_again(self) -> tuple[Incarnation | None, Incarnation | None]:
        attempt = self.world.brain._table.records[self.request].attempt
        assert attempt is not None
        assert attempt.key != self.key
        return attempt.prefill, attempt.decode


@pytest.fixture
def pairs() -> Pairs:
    return Pairs()


def test_death_of_the_decode_node_sends_nobody_away_from_the_cache_of_the_prefill_node(pairs: Pairs) -> None:
    pairs.hand_over()
    pairs.world.gone(pairs.decode)
    prefill, decode = pairs.placed_again()
    assert prefill == pairs.prefill
    assert decode != pairs.decode


def test_nor_does_its_death_during_the_hand_off(pairs: Pairs) -> None:
    pairs.world.gone(pairs.decode)
    assert pairs.world.brain._table.records[pairs.request].avoid == {pairs.decode}


@pytest.mark.parametrize("error", [Preempted("for a higher class"), OutOfMemory("none left")])
def test_what_decode_gives_up_is_not_held_against_its_writer(pairs: Pairs, error: Exception) -> None:
    pairs.hand_over()
    pairs.world.fail(pairs.decode, pairs.key, error)  # type: ignore[arg-type]
    prefill, decode = pairs.placed_again()
    assert prefill == pairs.prefill
    assert decode != pairs.decode


def test_a_hand_off_that_fails_is_held_against_both(pairs: Pairs) -> None:
    pairs.world.fail(pairs.decode, pairs.key, Incomplete("a slab is missing"))
    prefill, decode = pairs.placed_again()
    assert prefill != pairs.prefill
    assert decode != pairs.decode


def test_figures_of_a_node_that_cannot_be_do_not_lose_a_request(pairs: Pairs) -> None:
    """More tokens from the pool than from all caches: a request ended, and nobody was told."""
    world = pairs.world
    world.say(pairs.decode, m.Reserved(pairs.key, None, 99))
    world.say(
        pairs.decode, m.Admitted(pairs.key, computed_tokens=1, cached_tokens=5, received_tokens=0, pooled_tokens=8)
    )
    for index in range(8):
        world.token(pairs.decode, pairs.key, index)
    request: RequestId = pairs.request
    assert len(world.ends(request)) == 1
    told = world.brain.explain(request, world.now)
    assert (told.sources.local_cache, told.sources.pool) == (0, 5)
