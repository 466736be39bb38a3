"""Which nodes a retried request avoids, and which it should return to."""

import pytest

from baton.cluster_link.messages import BlocksReserved, CacheSnapshot, DecodeStarted
from baton.errors import IncompleteTransfer, OutOfMemory, Preempted
from baton.types import AttemptKey, Incarnation, RequestId
from coordinator.core.placement.policies import RAMP_UP_SECONDS, PrefixAwarePolicy
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


class TwoByTwoCluster:
    """Two nodes of each role, and a request that the first prefill node has handed over."""

    def __init__(self) -> None:
        self.world = BrainHarness(placement=PrefixAwarePolicy())
        names = (("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("d1", DECODE))
        self.nodes = {name: self.world.join_node(name, role) for name, role in names}
        for node in self.nodes.values():
            self.world.send_heartbeat(node)
        self.world.advance(2 * RAMP_UP_SECONDS)
        self.request = self.world.submit(prompt=100, max_tokens=8)
        record = self.world.brain.parts.table.records[self.request]
        assert record.attempt is not None
        self.key: AttemptKey = record.attempt.key
        assert record.attempt.prefill is not None
        assert record.attempt.decode is not None
        self.prefill: Incarnation = record.attempt.prefill
        self.decode: Incarnation = record.attempt.decode

    def complete_handoff(self) -> None:
        """Complete the hand-off: both nodes then have the prompt cached, as the prefill node
        reports."""
        world, record = self.world, self.world.brain.parts.table.records[self.request]
        world.report_reserved(self.decode, self.key, self.prefill)
        world.report_prefill_ended(self.prefill, self.key, 100)
        world.send_from_node(self.decode, DecodeStarted(self.key, 0, 0, 100))
        world.report_handed_off(self.prefill, self.key)
        world.report_token(self.decode, self.key, 0)
        names = tuple(world.brain.placement_state.cached_prefixes.hash_prompt(record.request))
        world.send_from_node(self.prefill, CacheSnapshot(1, names))

    def get_new_placement(self) -> tuple[Incarnation | None, Incarnation | None]:
        attempt = self.world.brain.parts.table.records[self.request].attempt
        assert attempt is not None
        assert attempt.key != self.key
        return attempt.prefill, attempt.decode


@pytest.fixture
def pairs() -> TwoByTwoCluster:
    return TwoByTwoCluster()


def test_decode_node_death_does_not_avoid_prefill_node_with_cached_prompt(
    pairs: TwoByTwoCluster,
) -> None:
    pairs.complete_handoff()
    pairs.world.lose_node(pairs.decode)
    prefill, decode = pairs.get_new_placement()
    assert prefill == pairs.prefill
    assert decode != pairs.decode


def test_decode_node_death_during_handoff_avoids_only_decode_node(pairs: TwoByTwoCluster) -> None:
    pairs.world.lose_node(pairs.decode)
    assert pairs.world.brain.parts.table.records[pairs.request].avoided_nodes == {pairs.decode}


@pytest.mark.parametrize("error", [Preempted("for a higher class"), OutOfMemory("none left")])
def test_decode_failure_after_commit_does_not_avoid_prefill_node(
    pairs: TwoByTwoCluster, error: Exception
) -> None:
    pairs.complete_handoff()
    pairs.world.report_failure(pairs.decode, pairs.key, error)  # type: ignore[arg-type]
    prefill, decode = pairs.get_new_placement()
    assert prefill == pairs.prefill
    assert decode != pairs.decode


def test_failed_handoff_avoids_both_nodes(pairs: TwoByTwoCluster) -> None:
    pairs.world.report_failure(pairs.decode, pairs.key, IncompleteTransfer("a slab is missing"))
    prefill, decode = pairs.get_new_placement()
    assert prefill != pairs.prefill
    assert decode != pairs.decode


def test_inconsistent_node_token_counts_do_not_lose_request(pairs: TwoByTwoCluster) -> None:
    """More tokens from the pool than from all caches: a request ended, and nobody was told."""
    world = pairs.world
    world.send_from_node(pairs.decode, BlocksReserved(pairs.key, None, 99))
    world.send_from_node(
        pairs.decode,
        DecodeStarted(
            pairs.key, computed_tokens=1, cached_tokens=5, received_tokens=0, pool_tokens=8
        ),
    )
    for index in range(8):
        world.report_token(pairs.decode, pairs.key, index)
    request: RequestId = pairs.request
    assert len(world.end_events(request)) == 1
    told = world.explain_request(request)
    assert (told.sources.local_cache, told.sources.pool) == (0, 5)
