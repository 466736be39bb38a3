"""The index against brute force, and what happens when a hash lies."""

from hypothesis import given
from hypothesis import strategies as st

from baton.kv.blocks import BlockHash, HashChain
from baton.types import BlockIndex
from node_engine.core.blocks.block_records import IndexedBlock, PrefixIndex, common_prefix_length

SIZE = 3
ROOT = BlockHash(b"root")
contents = st.lists(st.integers(0, 1), min_size=SIZE, max_size=3 * SIZE).map(
    lambda tokens: tuple(tokens[: len(tokens) // SIZE * SIZE])
)


def entry(tokens: tuple[int, ...]) -> IndexedBlock:
    """The last block of `tokens`."""
    chain = HashChain(ROOT, tokens, SIZE)
    number = len(tokens) // SIZE - 1
    return IndexedBlock(
        chain.block_hash(number), chain.parent_hash(number), chain.block_tokens(number)
    )


@given(added=st.lists(contents, max_size=30), data=st.data())
def test_against_brute_force(added: list[tuple[int, ...]], data: st.DataObject) -> None:
    index = PrefixIndex()
    kept: dict[BlockIndex, tuple[int, ...]] = {}
    for number, tokens in enumerate(added):
        index.add_block(BlockIndex(number), entry(tokens))
        kept[BlockIndex(number)] = tokens
    for block in data.draw(
        st.lists(st.sampled_from(sorted(kept)), unique=True) if kept else st.just([])
    ):
        index.remove_block(block)
        del kept[block]
    index.check_invariants()
    prefix = data.draw(contents | st.just(()))
    rest = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=SIZE)))
    parent = HashChain(ROOT, prefix, SIZE).parent_hash(len(prefix) // SIZE)

    children = [tokens for tokens in kept.values() if tokens[:-SIZE] == prefix]
    longest = max((common_prefix_length(child[-SIZE:], rest) for child in children), default=0)
    found = index.find_partial_match(parent, rest)
    assert (found[1] if found else 0) == longest
    if found:
        assert kept[found[0]][: len(prefix) + longest] == prefix + rest[:longest]

    if len(rest) == SIZE:
        wanted = entry(prefix + rest)
        whole = index.find_block(wanted.block_hash, wanted.parent_hash, rest)
        twins = [block for block, tokens in kept.items() if tokens == prefix + rest]
        assert whole == (min(twins) if twins else None), "the first of several is found"


def test_hash_collision_serves_nothing() -> None:
    index = PrefixIndex()
    index.add_block(BlockIndex(0), IndexedBlock(BlockHash(b"same"), ROOT, (1, 1, 1)))
    index.add_block(BlockIndex(1), IndexedBlock(BlockHash(b"same"), ROOT, (2, 2, 2)))
    index.check_invariants()
    assert index.find_block(BlockHash(b"same"), ROOT, (1, 1, 1)) == 0
    assert index.find_block(BlockHash(b"same"), ROOT, (2, 2, 2)) is None
    assert index.find_block(BlockHash(b"same"), BlockHash(b"other"), (1, 1, 1)) is None
    assert BlockIndex(1) not in index


def test_duplicate_is_found_after_the_first_is_removed() -> None:
    index = PrefixIndex()
    for number in range(3):
        index.add_block(BlockIndex(number), entry((1, 0, 1)))
    index.remove_block(BlockIndex(0))
    index.check_invariants()
    wanted = entry((1, 0, 1))
    assert index.find_block(wanted.block_hash, wanted.parent_hash, wanted.token_ids) == 1
