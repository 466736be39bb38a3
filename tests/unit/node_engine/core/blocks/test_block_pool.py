"""The pool's transitions, one by one."""

import pytest

from baton.kv.blocks import BlockHash, HashChain
from baton.process.clock import FakeClock
from baton.types import BlockIndex, TicketId
from node_engine.core.blocks.block_pool import BlockPool, PartialHit
from node_engine.core.blocks.block_records import BlockLedgerError, BlockState

ROOT = BlockHash(b"root")
SIZE = 4
T = TicketId("t")


def make_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE, FakeClock())


def cache_tokens(pool: BlockPool, tokens: list[int]) -> HashChain:
    """Compute `tokens`, whole blocks, seal them and let them go."""
    chain = HashChain(ROOT, tokens, SIZE)
    match = pool.match_prefix(chain, len(tokens), "warmer", allow_partial=False)
    fresh = pool.allocate_blocks(len(tokens) // SIZE - len(match.blocks), "warmer")
    assert fresh is not None
    table = (*match.blocks, *fresh)
    for number in range(len(match.blocks), len(table)):
        pool.index_block(table[number], chain, number)
    pool.release_blocks(table, "warmer")
    pool.check_invariants()
    return chain


def count_found_tokens(pool: BlockPool, chain: HashChain) -> int:
    """Tokens at the beginning of `chain` that whole blocks hold. A look, and no use of them."""
    held = 0
    while held < len(chain.tokens):
        number = held // SIZE
        if (
            pool.prefix_index.find_block(
                chain.block_hash(number), chain.parent_hash(number), chain.block_tokens(number)
            )
            is None
        ):
            break
        held += SIZE
    return held


# tickets: every state against every operation

STEPS = {
    "reserve": lambda pool: pool.reservations.reserve_for_ticket(2, T, "a"),
    "mark_writing": lambda pool: pool.reservations.mark_writing(T),
    "commit": lambda pool: pool.reservations.commit_ticket(T),
    "release_ticket": lambda pool: pool.reservations.release_ticket(T),
    "quarantine": lambda pool: pool.reservations.quarantine_ticket(T),
    "fenced": lambda pool: pool.reservations.free_quarantined_ticket(T),
}
PATHS: dict[BlockState, list[str]] = {
    BlockState.FREE: [],
    BlockState.RESERVED: ["reserve"],
    BlockState.WRITING: ["reserve", "mark_writing"],
    BlockState.IN_USE: ["reserve", "mark_writing", "commit"],
    BlockState.QUARANTINED: ["reserve", "quarantine"],
}
LEGAL: dict[tuple[BlockState, str], BlockState] = {
    (BlockState.FREE, "reserve"): BlockState.RESERVED,
    (BlockState.RESERVED, "mark_writing"): BlockState.WRITING,
    (BlockState.RESERVED, "release_ticket"): BlockState.FREE,
    (BlockState.RESERVED, "quarantine"): BlockState.QUARANTINED,
    (BlockState.WRITING, "commit"): BlockState.IN_USE,
    (BlockState.WRITING, "release_ticket"): BlockState.FREE,
    (BlockState.WRITING, "quarantine"): BlockState.QUARANTINED,
    (BlockState.QUARANTINED, "fenced"): BlockState.FREE,
}


def test_every_state_is_covered() -> None:
    assert set(PATHS) | {BlockState.CACHED} == set(BlockState)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", PATHS)
def test_ticket_transitions(state: BlockState, step: str) -> None:
    pool = make_pool(2)
    for each in PATHS[state]:
        STEPS[each](pool)
    assert pool.ownership.count_blocks(state) == 2
    after = LEGAL.get((state, step))
    if after is None and (state, step) == (BlockState.IN_USE, "reserve"):
        assert (
            pool.reservations.reserve_for_ticket(1, T, "a") is None
        )  # a ticket that has committed is forgotten; there is no room
    elif after is None:
        with pytest.raises(BlockLedgerError):
            STEPS[step](pool)
    else:
        STEPS[step](pool)
        assert pool.ownership.count_blocks(after) == 2
    pool.check_invariants()


def test_quarantined_blocks_are_not_allocated() -> None:
    pool = make_pool(4)
    pool.reservations.reserve_for_ticket(3, T, "a")
    pool.reservations.mark_writing(T)
    pool.reservations.quarantine_ticket(T)
    assert pool.num_available_blocks == 1
    assert pool.allocate_blocks(2, "b") is None
    pool.reservations.free_quarantined_ticket(T)
    assert pool.allocate_blocks(4, "b") is not None


# references


def test_failed_allocation_changes_nothing() -> None:
    pool = make_pool(4)
    pool.allocate_blocks(3, "a")
    assert pool.allocate_blocks(2, "b") is None
    assert pool.reservations.reserve_for_ticket(2, T, "b") is None
    assert pool.ownership.count_blocks_held_by("b") == 0
    assert pool.num_available_blocks == 1
    pool.check_invariants()


def test_releasing_what_one_does_not_hold() -> None:
    pool = make_pool()
    blocks = pool.allocate_blocks(1, "a")
    assert blocks is not None
    with pytest.raises(BlockLedgerError, match="b does not hold"):
        pool.release_blocks(blocks, "b")
    pool.release_blocks(blocks, "a")
    with pytest.raises(BlockLedgerError, match="a does not hold"):
        pool.release_blocks(blocks, "a")
    pool.check_invariants()


@pytest.mark.parametrize(
    "path", [[], ["reserve"], ["reserve", "mark_writing"], ["reserve", "quarantine"]]
)
def test_only_committed_blocks_are_shared_or_indexed(path: list[str]) -> None:
    pool = make_pool(2)
    for each in path:
        STEPS[each](pool)
    with pytest.raises(BlockLedgerError):
        pool.share_blocks((BlockIndex(0),), "b")
    with pytest.raises(BlockLedgerError):
        pool.index_block(BlockIndex(0), HashChain(ROOT, [1, 2, 3, 4], SIZE), 0)


def test_block_is_indexed_once() -> None:
    pool = make_pool()
    pool.allocate_blocks(1, "a")
    chain = HashChain(ROOT, [1, 2, 3, 4], SIZE)
    pool.index_block(BlockIndex(0), chain, 0)
    with pytest.raises(BlockLedgerError, match="indexed before"):
        pool.index_block(BlockIndex(0), chain, 0)


def test_partly_filled_block_is_found_then_the_full_one() -> None:
    pool = make_pool()
    block, *_ = pool.allocate_blocks(2, "a") or ()
    tokens = [1, 2, 3]
    chain = HashChain(ROOT, tokens, SIZE)
    pool.index_block(block, chain, 0, 2)
    for rest in ([3, 4], [9]):
        match = pool.match_prefix(HashChain(ROOT, [1, 2, *rest], SIZE), 4, "b")
        assert (match.blocks, match.partial_hit) == ((), PartialHit(block, 2)), (
            "the third token is nobody's business"
        )
        pool.release_blocks((block,), "b")
    with pytest.raises(BlockLedgerError, match="indexed before"):
        pool.index_block(block, chain, 0, 2)
    tokens.append(4)
    pool.index_block(block, chain, 0)
    assert pool.match_prefix(HashChain(ROOT, [1, 2, 3, 4], SIZE), 4, "b").blocks == (block,)
    with pytest.raises(BlockLedgerError, match="indexed before"):
        pool.index_block(block, chain, 0, 3)
    pool.check_invariants()


def test_partly_filled_block_is_cached_on_release() -> None:
    pool = make_pool(1)
    block, *_ = pool.allocate_blocks(1, "a") or ()
    pool.index_block(block, HashChain(ROOT, [1, 2, 3], SIZE), 0, 3)
    pool.release_blocks((block,), "a")
    assert pool.ownership.get_block_state(block) is BlockState.CACHED
    assert pool.match_prefix(HashChain(ROOT, [1, 2, 3, 4], SIZE), 4, "b").partial_hit == PartialHit(
        block, 3
    )
    pool.release_blocks((block,), "b")
    assert pool.allocate_blocks(1, "c") == (block,)
    assert len(pool.prefix_index) == 0


# prefixes


@pytest.mark.parametrize(
    ("cap", "blocks", "partial"),
    [(8, 2, 0), (7, 1, 3), (5, 1, 1), (4, 1, 0), (3, 0, 3), (1, 0, 1), (0, 0, 0)],
)
def test_match_prefix_respects_max_tokens(cap: int, blocks: int, partial: int) -> None:
    pool = make_pool()
    chain = cache_tokens(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    match = pool.match_prefix(chain, cap, "a")
    assert len(match.blocks) == blocks
    assert (match.partial_hit.num_tokens if match.partial_hit else 0) == partial
    assert match.num_tokens == cap
    assert pool.ownership.count_blocks_held_by("a") == blocks + (1 if partial else 0)
    pool.check_invariants()


def test_a_match_is_safe_from_eviction() -> None:
    pool = make_pool(4)
    chain = cache_tokens(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    match = pool.match_prefix(chain, 6, "a")
    assert match.partial_hit is not None
    assert pool.allocate_blocks(3, "b") is None, "two blocks are free, two are referenced"
    assert pool.allocate_blocks(2, "b") is not None
    assert pool.ownership.get_block_state(match.partial_hit.source_block) is BlockState.IN_USE


def test_eviction_takes_the_least_recent_and_leaves_before_parents() -> None:
    pool = make_pool(6)
    old = cache_tokens(pool, [1] * 12)
    new = cache_tokens(pool, [2] * 12)
    pool.allocate_blocks(2, "a")
    assert count_found_tokens(pool, old) == 4, "its last two blocks went first"
    assert count_found_tokens(pool, new) == 12
    pool.allocate_blocks(2, "a")
    assert count_found_tokens(pool, old) == 0
    assert count_found_tokens(pool, new) == 8


def test_a_hit_refreshes_the_whole_prefix() -> None:
    pool = make_pool(6)
    first = cache_tokens(pool, [1] * 12)
    cache_tokens(pool, [2] * 12)
    match = pool.match_prefix(first, 12, "a", allow_partial=False)
    pool.release_blocks(match.blocks, "a")
    pool.allocate_blocks(3, "b")
    assert count_found_tokens(pool, first) == 12


def test_one_of_equal_blocks_is_cached() -> None:
    """Two sequences compute the same block; both may use theirs, and only one stays as cache."""
    pool = make_pool(4)
    tokens = [1, 2, 3, 4]
    for owner in ("a", "b"):
        pool.allocate_blocks(1, owner)
        pool.index_block(BlockIndex(0 if owner == "a" else 1), HashChain(ROOT, tokens, SIZE), 0)
        pool.check_invariants()
    assert pool.match_prefix(HashChain(ROOT, tokens, SIZE), 4, "c").blocks == (0,), (
        "the first one is found"
    )
    pool.release_blocks((BlockIndex(0),), "a")
    pool.release_blocks((BlockIndex(0),), "c")
    assert pool.ownership.get_block_state(BlockIndex(0)) is BlockState.FREE, "its twin lives on"
    assert pool.match_prefix(HashChain(ROOT, tokens, SIZE), 4, "c").blocks == (1,)
    pool.release_blocks((BlockIndex(1),), "c")
    pool.release_blocks((BlockIndex(1),), "b")
    assert pool.ownership.get_block_state(BlockIndex(1)) is BlockState.CACHED
    pool.check_invariants()


def test_cached_duplicate_gives_way_to_block_in_use() -> None:
    pool = make_pool(4)
    chain = HashChain(ROOT, [1, 2, 3, 4], SIZE)
    pool.allocate_blocks(1, "late")  # began before the other was there
    cache_tokens(pool, [1, 2, 3, 4])
    assert pool.ownership.count_blocks(BlockState.CACHED) == 1
    pool.index_block(BlockIndex(0), chain, 0)
    assert pool.ownership.count_blocks(BlockState.CACHED) == 0
    assert pool.match_prefix(chain, 4, "a").blocks == (0,)
    pool.check_invariants()


# the ledger


def test_ledger_names_every_owner() -> None:
    clock = FakeClock()
    pool = BlockPool(10, SIZE, clock)
    shared = pool.allocate_blocks(2, "a")
    assert shared is not None
    clock.advance(3.0)
    pool.share_blocks(shared, "b")
    pool.reservations.reserve_for_ticket(3, T, "c")
    clock.advance(1.0)
    pool.reservations.mark_writing(T)
    clock.advance(0.5)
    ledger = pool.take_ledger()
    assert ledger.is_balanced
    assert ledger.num_blocks == 10
    assert ledger.counts == {
        BlockState.FREE: 5,
        BlockState.RESERVED: 0,
        BlockState.WRITING: 3,
        BlockState.IN_USE: 2,
        BlockState.CACHED: 0,
        BlockState.QUARANTINED: 0,
    }
    assert {
        (each.owner, each.state, each.num_blocks, each.age_seconds, each.ticket_id)
        for each in ledger.entries
    } == {
        ("a", BlockState.IN_USE, 2, 4.5, None),
        ("b", BlockState.IN_USE, 2, 1.5, None),
        ("c", BlockState.WRITING, 3, 0.5, T),
    }


def test_check_invariants_finds_a_broken_account() -> None:
    pool = make_pool()
    pool.allocate_blocks(2, "a")
    pool.ownership._ref_counts[0] = 0
    with pytest.raises(BlockLedgerError, match="references"):
        pool.check_invariants()
