"""The radix index: what is found, what is refused, and that depth costs look-ups by its logarithm
only."""

import pytest

from baton.errors import InvalidRequest
from baton.kv.blocks import BlockHash, compute_packed_hashes, pack_tokens
from kv_pool.core.index.block_hash_table import BlockHashTable
from kv_pool.core.index.radix_index import ROOT, PromptChain, RadixIndex
from kv_pool.core.ledger import PoolLedgerError
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, ROOTS, make_block_chain, make_chain


def make_index(*prompts: PromptChain, blocks: int = 32) -> RadixIndex:
    index, fresh = RadixIndex(blocks, PROMPT_BLOCK_TOKENS), iter(range(blocks))
    for prompt in prompts:
        path = list(index.match_prefix(prompt))
        for number in range(len(path), len(prompt)):
            path.append(next(fresh))
            assert index.insert_block(path[-1], prompt, number, path[-2] if number else ROOT)
    index.check()
    return index


def test_the_longest_prefix_is_found() -> None:
    index = make_index(make_block_chain(1, 2, 3), make_block_chain(1, 2, 4, 5))
    assert list(index.match_prefix(make_block_chain(1, 2, 3, 9))) == [0, 1, 2]
    assert list(index.match_prefix(make_block_chain(1, 2, 4, 5))) == [0, 1, 3, 4]
    assert list(index.match_prefix(make_block_chain(1, 9))) == [0]
    assert list(index.match_prefix(make_block_chain(2, 3))) == []
    assert list(index.match_prefix(make_block_chain(1, 2, 3), max_blocks=2)) == [0, 1]
    assert list(index.match_prefix(make_chain([1, 1]))) == []


def test_roots_share_nothing() -> None:
    index = make_index(make_block_chain(1, 2))
    assert list(index.match_prefix(make_block_chain(1, 2, root=ROOTS[1]))) == []


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_equal_hashes_with_other_tokens_end_the_match(wrong: int) -> None:
    """As if SHA-256 had collided."""
    index, good = make_index(make_block_chain(1, 2, 3)), make_block_chain(1, 2, 3)
    tokens = bytearray(good.packed_tokens)
    tokens[wrong * PROMPT_BLOCK_TOKENS * 4] ^= 1
    assert (
        list(
            index.match_prefix(
                PromptChain(good.root_hash, good.packed_hashes, bytes(tokens), PROMPT_BLOCK_TOKENS)
            )
        )
        == [0, 1, 2][:wrong]
    )


def test_equal_hashes_and_tokens_under_another_root_do_not_match() -> None:
    index, good = make_index(make_block_chain(1, 2)), make_block_chain(1, 2)
    assert (
        list(
            index.match_prefix(
                PromptChain(ROOTS[1], good.packed_hashes, good.packed_tokens, PROMPT_BLOCK_TOKENS)
            )
        )
        == []
    )


def test_index_key_collision_is_refused_with_its_descendants() -> None:
    first, other = make_block_chain(1), make_block_chain(2, 3)
    names = bytearray(other.packed_hashes)
    names[:8] = first.packed_hashes[:8]
    clash = PromptChain(other.root_hash, bytes(names), other.packed_tokens, PROMPT_BLOCK_TOKENS)
    index = make_index(first)
    assert not index.insert_block(5, clash, 0, ROOT)
    assert list(index.match_prefix(clash)) == []
    index.check()


def test_hashes_in_the_wrong_order_do_not_match() -> None:
    good = make_block_chain(1, 2)
    swapped = PromptChain(
        good.root_hash,
        good.block_hash(1) + good.block_hash(0),
        good.packed_tokens,
        PROMPT_BLOCK_TOKENS,
    )
    assert list(make_index(good).match_prefix(swapped)) == []


def test_partial_match_prefers_the_longest_shared_tokens() -> None:
    index = make_index(
        make_chain([1, 1, 1, 1, 5, 6, 7, 8]),
        make_chain([1, 1, 1, 1, 5, 6, 9, 9]),
        make_chain([1, 1, 1, 1, 2, 2, 2, 2]),
    )
    for rest, expected in {
        (5, 6, 7): (1, 3),
        (5, 6, 8, 1): (1, 2),
        (5, 6, 9, 0, 3): (2, 3),
        (2,): (3, 1),
        (4, 4): None,
        (): None,
    }.items():
        query = make_chain([1, 1, 1, 1, *rest])
        assert index.match_partial_block(query, index.match_prefix(query)) == expected
    none = make_chain([1, 1, 2])
    assert index.match_partial_block(none, index.match_prefix(none)) == (0, 2)
    assert (
        index.match_partial_block(make_chain([1, 1], ROOTS[1]), index.match_prefix(make_chain([])))
        is None
    )


def test_only_leaves_are_removed() -> None:
    index = make_index(make_block_chain(1, 2), make_block_chain(1, 3), make_block_chain(1, 4))
    with pytest.raises(PoolLedgerError, match="not a leaf"):
        index.remove_leaf(0)
    for block in (2, 1, 3, 0):
        index.remove_leaf(block)
        index.check()
    assert len(index) == 0
    with pytest.raises(PoolLedgerError, match="not a leaf"):
        index.remove_leaf(0)


def test_a_child_needs_its_parent() -> None:
    index = make_index(make_block_chain(1))
    with pytest.raises(PoolLedgerError, match="without its parent"):
        index.insert_block(3, make_block_chain(1, 2, 3), 2, 0)


def test_chain_can_be_read_back() -> None:
    prompt = make_block_chain(7, 8, 9)
    index = make_index(make_block_chain(1), prompt)
    assert index.chain(3) == prompt
    assert index.find_block(prompt.block_hash(1)) == 2
    assert index.find_block(bytes(32)) is None


@pytest.mark.slow
def test_match_takes_logarithmic_lookups() -> None:
    class Counting(BlockHashTable):
        num_lookups = 0

        def find_block(self, name: bytes) -> int | None:
            self.num_lookups += 1
            return super().find_block(name)

    prompt = make_chain(range(4 * 4096))
    index = make_index(prompt, blocks=4096)
    counting = Counting(4096)
    for block in range(4096):
        counting.add_block(block, index.block_hash(block))
    index._hash_table = counting
    assert len(index.match_prefix(prompt)) == 4096
    assert counting.num_lookups <= 13


def test_inconsistent_chain_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="needs 2 block hashes"):
        PromptChain(ROOTS[0], bytes(32), bytes(32), PROMPT_BLOCK_TOKENS)


def test_packed_hashes_equal_the_nodes_hashes() -> None:
    from baton.kv.blocks import iter_block_hashes as one_by_one

    tokens, root = [5, 70000, 2**32 - 1, 0, 1, 2, 3, 4, 9], BlockHash(bytes(range(32)))
    assert compute_packed_hashes(root, pack_tokens(tokens), PROMPT_BLOCK_TOKENS) == b"".join(
        one_by_one(root, tokens, PROMPT_BLOCK_TOKENS)
    )
    assert compute_packed_hashes(root, b"", PROMPT_BLOCK_TOKENS) == b""
