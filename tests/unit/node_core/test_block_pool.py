"""The pool's transitions, one by one."""

import pytest

from baton.block_hash import BlockHash
from baton.clock import FakeClock
from baton.hash_chain import HashChain
from baton.types import BlockIndex, TicketId
from node_engine.core.block_pool import BlockPool, PartialHit
from node_engine.core.ledger import BlockState, LedgerError

ROOT = BlockHash(b"root")
SIZE = 4
T = TicketId("t")


def a_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE, FakeClock())


def cached(pool: BlockPool, tokens: list[int]) -> HashChain:
    """Compute `tokens`, whole blocks, seal them and let them go."""
    chain = HashChain(ROOT, tokens, SIZE)
    match = pool.match_prefix(chain, len(tokens), "warmer", allow_partial=False)
    fresh = pool.allocate(len(tokens) // SIZE - len(match.blocks), "warmer")
    assert fresh is not None
    table = (*match.blocks, *fresh)
    for number in range(len(match.blocks), len(table)):
        pool.seal_block(table[number], chain, number)
    pool.release(table, "warmer")
    pool.check()
    return chain


def found(pool: BlockPool, chain: HashChain) -> int:
    """Tokens at the beginning of `chain` that whole blocks hold. A look, and no use of them."""
    held = 0
    while held < len(chain.tokens):
        number = held // SIZE
        if pool.index.find(chain.name(number), chain.parent(number), chain.block_tokens(number)) is None:
            break
        held += SIZE
    return held


# tickets: every state against every operation

STEPS = {
    "reserve": lambda pool: pool.reserve(2, T, "a"),
    "mark_writing": lambda pool: pool.mark_writing(T),
    "commit": lambda pool: pool.commit(T),
    "release_ticket": lambda pool: pool.release_ticket(T),
    "quarantine": lambda pool: pool.quarantine(T),
    "fenced": lambda pool: pool.fenced(T),
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
    pool = a_pool(2)
    for each in PATHS[state]:
        STEPS[each](pool)
    assert pool.count(state) == 2
    after = LEGAL.get((state, step))
    if after is None and (state, step) == (BlockState.IN_USE, "reserve"):
        assert pool.reserve(1, T, "a") is None  # a ticket that has committed is forgotten; there is no room
    elif after is None:
        with pytest.raises(LedgerError):
            STEPS[step](pool)
    else:
        STEPS[step](pool)
        assert pool.count(after) == 2
    pool.check()


def test_a_late_writer_keeps_its_blocks_out_of_reach() -> None:
    pool = a_pool(4)
    pool.reserve(3, T, "a")
    pool.mark_writing(T)
    pool.quarantine(T)
    assert pool.available == 1
    assert pool.allocate(2, "b") is None
    pool.fenced(T)
    assert pool.allocate(4, "b") is not None


# references


def test_running_out_changes_nothing() -> None:
    pool = a_pool(4)
    pool.allocate(3, "a")
    assert pool.allocate(2, "b") is None
    assert pool.reserve(2, T, "b") is None
    assert pool.held_by("b") == 0
    assert pool.available == 1
    pool.check()


def test_releasing_what_one_does_not_hold() -> None:
    pool = a_pool()
    blocks = pool.allocate(1, "a")
    assert blocks is not None
    with pytest.raises(LedgerError, match="b does not hold"):
        pool.release(blocks, "b")
    pool.release(blocks, "a")
    with pytest.raises(LedgerError, match="a does not hold"):
        pool.release(blocks, "a")
    pool.check()


@pytest.mark.parametrize("path", [[], ["reserve"], ["reserve", "mark_writing"], ["reserve", "quarantine"]])
def test_only_committed_blocks_are_shared_or_sealed(path: list[str]) -> None:
    pool = a_pool(2)
    for each in path:
        STEPS[each](pool)
    with pytest.raises(LedgerError):
        pool.share((BlockIndex(0),), "b")
    with pytest.raises(LedgerError):
        pool.seal_block(BlockIndex(0), HashChain(ROOT, [1, 2, 3, 4], SIZE), 0)


def test_a_block_is_sealed_once() -> None:
    pool = a_pool()
    pool.allocate(1, "a")
    chain = HashChain(ROOT, [1, 2, 3, 4], SIZE)
    pool.seal_block(BlockIndex(0), chain, 0)
    with pytest.raises(LedgerError, match="sealed before"):
        pool.seal_block(BlockIndex(0), chain, 0)


def test_a_beginning_is_found_and_then_the_whole() -> None:
    pool = a_pool()
    block, *_ = pool.allocate(2, "a") or ()
    tokens = [1, 2, 3]
    chain = HashChain(ROOT, tokens, SIZE)
    pool.seal_block(block, chain, 0, 2)
    for rest in ([3, 4], [9]):
        match = pool.match_prefix(HashChain(ROOT, [1, 2, *rest], SIZE), 4, "b")
        assert (match.blocks, match.partial) == ((), PartialHit(block, 2)), "the third token is nobody's business"
        pool.release((block,), "b")
    with pytest.raises(LedgerError, match="sealed before"):
        pool.seal_block(block, chain, 0, 2)
    tokens.append(4)
    pool.seal_block(block, chain, 0)
    assert pool.match_prefix(HashChain(ROOT, [1, 2, 3, 4], SIZE), 4, "b").blocks == (block,)
    with pytest.raises(LedgerError, match="sealed before"):
        pool.seal_block(block, chain, 0, 3)
    pool.check()


def test_a_beginning_is_kept_as_cache() -> None:
    pool = a_pool(1)
    block, *_ = pool.allocate(1, "a") or ()
    pool.seal_block(block, HashChain(ROOT, [1, 2, 3], SIZE), 0, 3)
    pool.release((block,), "a")
    assert pool.state(block) is BlockState.CACHED
    assert pool.match_prefix(HashChain(ROOT, [1, 2, 3, 4], SIZE), 4, "b").partial == PartialHit(block, 3)
    pool.release((block,), "b")
    assert pool.allocate(1, "c") == (block,)
    assert len(pool.index) == 0


# prefixes


@pytest.mark.parametrize(
    ("cap", "blocks", "partial"), [(8, 2, 0), (7, 1, 3), (5, 1, 1), (4, 1, 0), (3, 0, 3), (1, 0, 1), (0, 0, 0)]
)
def test_the_cap_of_a_match(cap: int, blocks: int, partial: int) -> None:
    pool = a_pool()
    chain = cached(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    match = pool.match_prefix(chain, cap, "a")
    assert len(match.blocks) == blocks
    assert (match.partial.num_tokens if match.partial else 0) == partial
    assert match.num_tokens == cap
    assert pool.held_by("a") == blocks + (1 if partial else 0)
    pool.check()


def test_a_match_is_safe_from_eviction() -> None:
    pool = a_pool(4)
    chain = cached(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    match = pool.match_prefix(chain, 6, "a")
    assert match.partial is not None
    assert pool.allocate(3, "b") is None, "two blocks are free, two are referenced"
    assert pool.allocate(2, "b") is not None
    assert pool.state(match.partial.source) is BlockState.IN_USE


def test_eviction_takes_the_least_recent_and_leaves_before_parents() -> None:
    pool = a_pool(6)
    old = cached(pool, [1] * 12)
    new = cached(pool, [2] * 12)
    pool.allocate(2, "a")
    assert found(pool, old) == 4, "its last two blocks went first"
    assert found(pool, new) == 12
    pool.allocate(2, "a")
    assert found(pool, old) == 0
    assert found(pool, new) == 8


def test_a_hit_refreshes_the_whole_prefix() -> None:
    pool = a_pool(6)
    first = cached(pool, [1] * 12)
    cached(pool, [2] * 12)
    match = pool.match_prefix(first, 12, "a", allow_partial=False)
    pool.release(match.blocks, "a")
    pool.allocate(3, "b")
    assert found(pool, first) == 12


def test_of_equal_blocks_one_is_kept() -> None:
    """Two sequences compute the same block; both may use theirs, and only one stays as cache."""
    pool = a_pool(4)
    tokens = [1, 2, 3, 4]
    for owner in ("a", "b"):
        pool.allocate(1, owner)
        pool.seal_block(BlockIndex(0 if owner == "a" else 1), HashChain(ROOT, tokens, SIZE), 0)
        pool.check()
    assert pool.match_prefix(HashChain(ROOT, tokens, SIZE), 4, "c").blocks == (0,), "the first one is found"
    pool.release((BlockIndex(0),), "a")
    pool.release((BlockIndex(0),), "c")
    assert pool.state(BlockIndex(0)) is BlockState.FREE, "its twin lives on"
    assert pool.match_prefix(HashChain(ROOT, tokens, SIZE), 4, "c").blocks == (1,)
    pool.release((BlockIndex(1),), "c")
    pool.release((BlockIndex(1),), "b")
    assert pool.state(BlockIndex(1)) is BlockState.CACHED
    pool.check()


def test_a_cached_twin_makes_way() -> None:
    pool = a_pool(4)
    chain = HashChain(ROOT, [1, 2, 3, 4], SIZE)
    pool.allocate(1, "late")  # began before the other was there
    cached(pool, [1, 2, 3, 4])
    assert pool.count(BlockState.CACHED) == 1
    pool.seal_block(BlockIndex(0), chain, 0)
    assert pool.count(BlockState.CACHED) == 0
    assert pool.match_prefix(chain, 4, "a").blocks == (0,)
    pool.check()


# the ledger


def test_the_ledger_names_everybody() -> None:
    clock = FakeClock()
    pool = BlockPool(10, SIZE, clock)
    shared = pool.allocate(2, "a")
    assert shared is not None
    clock.advance(3.0)
    pool.share(shared, "b")
    pool.reserve(3, T, "c")
    clock.advance(1.0)
    pool.mark_writing(T)
    clock.advance(0.5)
    ledger = pool.ledger()
    assert ledger.balanced
    assert ledger.total == 10
    assert ledger.counts == {
        BlockState.FREE: 5,
        BlockState.RESERVED: 0,
        BlockState.WRITING: 3,
        BlockState.IN_USE: 2,
        BlockState.CACHED: 0,
        BlockState.QUARANTINED: 0,
    }
    assert {(each.owner, each.state, each.blocks, each.age, each.ticket) for each in ledger.entries} == {
        ("a", BlockState.IN_USE, 2, 4.5, None),
        ("b", BlockState.IN_USE, 2, 1.5, None),
        ("c", BlockState.WRITING, 3, 0.5, T),
    }


def test_check_sees_a_broken_book() -> None:
    pool = a_pool()
    pool.allocate(2, "a")
    pool._accounts._refs[0] = 0
    with pytest.raises(LedgerError, match="references"):
        pool.check()
