"""Who goes first."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.core import eviction
from kv_pool.core.cost_eviction import CostEviction
from kv_pool.core.eviction import Evictor, Lru, Offers
from kv_pool.core.ghosts import Ghost, Ghosts
from kv_pool.core.reuse import ReuseModel
from kv_pool.core.tier import Tier
from tests.unit.pool_core.prompts import SIZE, fill, of_blocks


def evictors(blocks: int) -> list[Evictor]:
    return [Lru(blocks), CostEviction(blocks, SIZE)]


@pytest.mark.parametrize("which", [0, 1])
def test_leaves_go_first_and_the_pinned_never(which: int) -> None:
    tier = Tier(5, SIZE, evictors(5)[which])
    path = fill(tier, of_blocks(1, 2, 3))
    fill(tier, of_blocks(1, 7, 8), 1.0)
    tier.pin(path[-1])
    taken = tier.take(9, 2.0)
    assert len(taken) == 2, "the path of three stays"
    assert list(tier.match(of_blocks(1, 2, 3), 3.0)) == path
    tier.unpin(path[-1])
    assert len(tier.take(9, 4.0)) == 3
    tier.check()


def test_lru_takes_what_was_used_longest_ago() -> None:
    tier = Tier(4, SIZE, Lru(4))
    for now, one in enumerate((1, 2, 3, 4)):
        fill(tier, of_blocks(one), float(now))
    tier.match(of_blocks(1), 4.0)
    tier.match(of_blocks(3), 5.0)
    lost = []
    tier.follow(losing=lambda block: lost.append(tier.index.tokens(block)[3]))
    tier.take(4, 6.0)
    assert lost == [2, 4, 1, 3]


def test_cost_learns_that_what_was_used_will_be_used() -> None:
    """Pairs that come again every minute, among prompts that never do."""
    found = {}
    for name, evictor in zip(("lru", "cost"), evictors(40), strict=True):
        tier, hits, fresh = Tier(40, SIZE, evictor), 0, iter(range(1000, 100_000))
        for step in range(3000):
            prompt = of_blocks(step % 10, 500) if step % 7 == 0 else of_blocks(next(fresh))
            hits += len(tier.match(prompt, float(step)))
            fill(tier, prompt, float(step))
        found[name] = hits
        tier.check()
    assert found["lru"] == 0, "70 steps between two uses, and room for 40 blocks"
    assert found["cost"] > 600, "of 838 possible"


def test_cost_prefers_what_is_dear_to_compute() -> None:
    """Of equally likely blocks of about the same age the shallow one goes."""
    evictor = CostEviction(8, 16, quadratic=1000.0)
    for _ in range(300):  # a class must be known to be of any worth
        evictor.inserted(2, 3, 0, 0.0)
        evictor.used(array("i", [2]), 100.0)
    evictor.inserted(0, 1, 5000, 98.0)
    evictor.inserted(1, 2, 0, 99.0)
    evictor.offer(0)
    evictor.offer(1)
    assert evictor.choose(100.0) == 1
    assert evictor.choose(100.0) == 0
    assert evictor.choose(100.0) is None


def test_the_index_of_a_class_is_its_best_rate_of_hits() -> None:
    """Half of a class's blocks are used after 100 s, the others never: keeping one pays 0.5 uses for 100 s at most."""
    model = ReuseModel(2)
    model.entered(0, 100_000)
    for _ in range(50_000):
        model.reused(0, 100.0)
    rates = model.index()[0]
    assert rates[0] == pytest.approx(0.5 / 100, rel=0.35), "buckets grow by a quarter"
    assert rates[model.bucket(60.0)] > rates[0], "what is due soon is worth more"
    assert rates[model.bucket(300.0)] < rates[0] / 100, "who has been idle for longer is not used again"


def test_a_class_of_which_nothing_is_known_is_the_average_of_all() -> None:
    model = ReuseModel(2)
    model.entered(0, 1000)
    for age in range(500):
        model.reused(0, float(age))
    rates = model.index()
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_buckets_agree() -> None:
    model = ReuseModel(1)
    import numpy as np

    ages = [0.0, 0.5, 1.0, 1.3, 7.7, 100.0, 5000.0, 1e9]
    model.reused_all(np.zeros(len(ages), dtype=np.intp), np.array(ages))
    seen = [model.bucket(age) for age in ages]
    assert seen == sorted(seen)
    assert model._reused[0].nonzero()[0].tolist() == sorted(set(seen))


def test_ghosts_are_remembered_once() -> None:
    ghosts = Ghosts(4)
    ghosts.remember(7 << 40 | 3, Ghost(2, 70_000, 5.0))
    assert ghosts.recall(8 << 40 | 3) is None
    assert ghosts.recall(7 << 40 | 3) == Ghost(2, 0xFFFF, 5.0)
    assert ghosts.recall(7 << 40 | 3) is None


@given(st.lists(st.tuples(st.sampled_from(["offer", "use", "withdraw", "take"]), st.integers(0, 7)), max_size=80))
def test_of_what_is_offered_the_oldest_goes_however_often_queues_are_made_anew(steps: list[tuple[str, int]]) -> None:
    """Two queues; a block that is used changes to the other one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_SPARE", 1)
        offers, offered = Offers(8, 2), set[int]()
        queues, last_use = array("b", [0] * 8), array("d", [0.0] * 8)
        for now, (what, block) in enumerate(steps, 1):
            if what == "offer":
                offers.add(block, queues[block], last_use[block])
                offered.add(block)
            elif what == "use":
                queues[block], last_use[block] = 1 - queues[block], float(now)
                if block in offered:
                    offers.add(block, queues[block], last_use[block])
            elif what == "withdraw":
                offers.withdraw(block)
                offered.discard(block)
            for queue in range(2):
                mine = [(last_use[one], one) for one in offered if queues[one] == queue]
                found = offers.oldest(queue, queues, last_use)
                assert found == (min(mine)[1] if mine else -1)
                if what == "take" and found >= 0:
                    offers.withdraw(found)
                    offered.discard(found)
