"""Who goes first."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.eviction import evictor as eviction
from kv_pool.core.eviction.cost_evictor import CostEvictor
from kv_pool.core.eviction.evictor import CandidateQueues, Evictor, LruEvictor
from kv_pool.core.eviction.ghost_table import GhostEntry, GhostTable
from kv_pool.core.eviction.reuse_model import ReuseModel
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, insert_chain, make_block_chain


def make_evictors(blocks: int) -> list[Evictor]:
    return [LruEvictor(blocks), CostEvictor(blocks, PROMPT_BLOCK_TOKENS)]


@pytest.mark.parametrize("which", [0, 1])
def test_leaves_are_evicted_first_and_pinned_blocks_never(which: int) -> None:
    tier = CacheTier(5, PROMPT_BLOCK_TOKENS, make_evictors(5)[which])
    path = insert_chain(tier, make_block_chain(1, 2, 3))
    insert_chain(tier, make_block_chain(1, 7, 8), 1.0)
    tier.pin(path[-1])
    taken = tier.allocate_blocks(9, 2.0)
    assert len(taken) == 2, "the path of three stays"
    assert list(tier.match_prefix(make_block_chain(1, 2, 3), 3.0)) == path
    tier.unpin(path[-1])
    assert len(tier.allocate_blocks(9, 4.0)) == 3
    tier.check()


def test_lru_evicts_the_least_recently_used() -> None:
    tier = CacheTier(4, PROMPT_BLOCK_TOKENS, LruEvictor(4))
    for now, number in enumerate((1, 2, 3, 4)):
        insert_chain(tier, make_block_chain(number), float(now))
    tier.match_prefix(make_block_chain(1), 4.0)
    tier.match_prefix(make_block_chain(3), 5.0)
    lost = []
    tier.add_listeners(on_remove=lambda block: lost.append(tier.index.tokens.get_tokens(block)[3]))
    tier.allocate_blocks(4, 6.0)
    assert lost == [2, 4, 1, 3]


def test_cost_learns_to_keep_reused_blocks() -> None:
    """Pairs that come again every minute, among prompts that never do."""
    found = {}
    for name, evictor in zip(("lru", "cost"), make_evictors(40), strict=True):
        tier, hits, fresh = (
            CacheTier(40, PROMPT_BLOCK_TOKENS, evictor),
            0,
            iter(range(1000, 100_000)),
        )
        for step in range(3000):
            prompt = (
                make_block_chain(step % 10, 500) if step % 7 == 0 else make_block_chain(next(fresh))
            )
            hits += len(tier.match_prefix(prompt, float(step)))
            insert_chain(tier, prompt, float(step))
        found[name] = hits
        tier.check()
    assert found["lru"] == 0, "70 steps between two uses, and room for 40 blocks"
    assert found["cost"] > 600, "of 838 possible"


def test_cost_keeps_expensive_blocks() -> None:
    """Of equally likely blocks of about the same age the shallow one goes."""
    evictor = CostEvictor(8, 16, quadratic=1000.0)
    for _ in range(300):  # a class must be known to be of any worth
        evictor.on_block_inserted(2, 3, 0, 0.0)
        evictor.on_path_used(array("i", [2]), 100.0)
    evictor.on_block_inserted(0, 1, 5000, 98.0)
    evictor.on_block_inserted(1, 2, 0, 99.0)
    evictor.add_candidate(0)
    evictor.add_candidate(1)
    assert evictor.choose_victim(100.0) == 1
    assert evictor.choose_victim(100.0) == 0
    assert evictor.choose_victim(100.0) is None


def test_gittins_index_is_the_best_hit_rate() -> None:
    """Half of a class's blocks are used after 100 s, the others never: keeping one pays 0.5 uses
    for 100 s at most."""
    model = ReuseModel(2)
    model.record_entries(0, 100_000)
    for _ in range(50_000):
        model.record_reuse(0, 100.0)
    rates = model.compute_reuse_rates()[0]
    assert rates[0] == pytest.approx(0.5 / 100, rel=0.35), "buckets grow by a quarter"
    assert rates[model.age_bucket(60.0)] > rates[0], "what is due soon is worth more"
    assert rates[model.age_bucket(300.0)] < rates[0] / 100, (
        "who has been idle for longer is not used again"
    )


def test_class_without_evidence_is_the_average() -> None:
    model = ReuseModel(2)
    model.record_entries(0, 1000)
    for age in range(500):
        model.record_reuse(0, float(age))
    rates = model.compute_reuse_rates()
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_buckets_agree() -> None:
    model = ReuseModel(1)
    import numpy as np

    ages = [0.0, 0.5, 1.0, 1.3, 7.7, 100.0, 5000.0, 1e9]
    model.record_prompt_reuse(np.zeros(len(ages), dtype=np.intp), np.array(ages))
    seen = [model.age_bucket(age) for age in ages]
    assert seen == sorted(seen)
    assert model._reuse_counts[0].nonzero()[0].tolist() == sorted(set(seen))


def test_ghost_is_popped_once() -> None:
    ghosts = GhostTable(4)
    ghosts.add_ghost(7 << 40 | 3, GhostEntry(2, 70_000, 5.0))
    assert ghosts.pop_ghost(8 << 40 | 3) is None
    assert ghosts.pop_ghost(7 << 40 | 3) == GhostEntry(2, 0xFFFF, 5.0)
    assert ghosts.pop_ghost(7 << 40 | 3) is None


@given(
    st.lists(
        st.tuples(st.sampled_from(["offer", "use", "withdraw", "take"]), st.integers(0, 7)),
        max_size=80,
    )
)
def test_oldest_candidate_survives_queue_compaction(steps: list[tuple[str, int]]) -> None:
    """Two queues; a block that is used changes to the other one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_STALE_ALLOWANCE", 1)
        offers, offered = CandidateQueues(8, 2), set[int]()
        queues, last_use = array("b", [0] * 8), array("d", [0.0] * 8)
        for now, (action, block) in enumerate(steps, 1):
            if action == "offer":
                offers.add_block(block, queues[block], last_use[block])
                offered.add(block)
            elif action == "use":
                queues[block], last_use[block] = 1 - queues[block], float(now)
                if block in offered:
                    offers.add_block(block, queues[block], last_use[block])
            elif action == "withdraw":
                offers.remove_block(block)
                offered.discard(block)
            for queue in range(2):
                mine = [(last_use[block], block) for block in offered if queues[block] == queue]
                found = offers.find_oldest(queue, queues, last_use)
                assert found == (min(mine)[1] if mine else -1)
                if action == "take" and found >= 0:
                    offers.remove_block(found)
                    offered.discard(found)
