"""The radix index: what is found, what is refused, and that depth costs look-ups by its logarithm only."""

import pytest

from baton.block_hash import BlockHash, chain_names, pack_tokens
from baton.errors import InvalidRequest
from kv_pool.core.chain import Chain
from kv_pool.core.ledger import LedgerError
from kv_pool.core.name_table import NameTable
from kv_pool.core.radix_index import ROOT, RadixIndex
from tests.unit.pool_core.prompts import ROOTS, SIZE, chain, of_blocks


def index_of(*prompts: Chain, blocks: int = 32) -> RadixIndex:
    index, fresh = RadixIndex(blocks, SIZE), iter(range(blocks))
    for prompt in prompts:
        path = list(index.match(prompt))
        for number in range(len(path), len(prompt)):
            path.append(next(fresh))
            assert index.insert(path[-1], prompt, number, path[-2] if number else ROOT)
    index.check()
    return index


def test_the_longest_prefix_is_found() -> None:
    index = index_of(of_blocks(1, 2, 3), of_blocks(1, 2, 4, 5))
    assert list(index.match(of_blocks(1, 2, 3, 9))) == [0, 1, 2]
    assert list(index.match(of_blocks(1, 2, 4, 5))) == [0, 1, 3, 4]
    assert list(index.match(of_blocks(1, 9))) == [0]
    assert list(index.match(of_blocks(2, 3))) == []
    assert list(index.match(of_blocks(1, 2, 3), most=2)) == [0, 1]
    assert list(index.match(chain([1, 1]))) == []


def test_another_root_shares_nothing() -> None:
    index = index_of(of_blocks(1, 2))
    assert list(index.match(of_blocks(1, 2, root=ROOTS[1]))) == []


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_equal_names_of_other_tokens_end_the_match(wrong: int) -> None:
    """As if SHA-256 had collided."""
    index, good = index_of(of_blocks(1, 2, 3)), of_blocks(1, 2, 3)
    tokens = bytearray(good.tokens)
    tokens[wrong * SIZE * 4] ^= 1
    assert list(index.match(Chain(good.root, good.names, bytes(tokens), SIZE))) == [0, 1, 2][:wrong]


def test_equal_names_and_tokens_of_another_root_are_no_hit() -> None:
    index, good = index_of(of_blocks(1, 2)), of_blocks(1, 2)
    assert list(index.match(Chain(ROOTS[1], good.names, good.tokens, SIZE))) == []


def test_a_key_that_is_taken_is_refused_and_what_follows_too() -> None:
    first, other = of_blocks(1), of_blocks(2, 3)
    names = bytearray(other.names)
    names[:8] = first.names[:8]
    clash = Chain(other.root, bytes(names), other.tokens, SIZE)
    index = index_of(first)
    assert not index.insert(5, clash, 0, ROOT)
    assert list(index.match(clash)) == []
    index.check()


def test_names_in_the_wrong_place_are_no_hit() -> None:
    good = of_blocks(1, 2)
    swapped = Chain(good.root, good.name(1) + good.name(0), good.tokens, SIZE)
    assert list(index_of(good).match(swapped)) == []


def test_the_block_that_shares_most_of_what_comes_next() -> None:
    index = index_of(chain([1, 1, 1, 1, 5, 6, 7, 8]), chain([1, 1, 1, 1, 5, 6, 9, 9]), chain([1, 1, 1, 1, 2, 2, 2, 2]))
    for rest, expected in {
        (5, 6, 7): (1, 3),
        (5, 6, 8, 1): (1, 2),
        (5, 6, 9, 0, 3): (2, 3),
        (2,): (3, 1),
        (4, 4): None,
        (): None,
    }.items():
        wanted = chain([1, 1, 1, 1, *rest])
        assert index.beginning(wanted, index.match(wanted)) == expected
    none = chain([1, 1, 2])
    assert index.beginning(none, index.match(none)) == (0, 2)
    assert index.beginning(chain([1, 1], ROOTS[1]), index.match(chain([]))) is None


def test_only_leaves_are_removed() -> None:
    index = index_of(of_blocks(1, 2), of_blocks(1, 3), of_blocks(1, 4))
    with pytest.raises(LedgerError, match="no leaf"):
        index.remove(0)
    for block in (2, 1, 3, 0):
        index.remove(block)
        index.check()
    assert len(index) == 0
    with pytest.raises(LedgerError, match="no leaf"):
        index.remove(0)


def test_a_child_needs_its_parent() -> None:
    index = index_of(of_blocks(1))
    with pytest.raises(LedgerError, match="without a parent"):
        index.insert(3, of_blocks(1, 2, 3), 2, 0)


def test_what_it_holds_can_be_read_back() -> None:
    prompt = of_blocks(7, 8, 9)
    index = index_of(of_blocks(1), prompt)
    assert index.chain(3) == prompt
    assert index.find(prompt.name(1)) == 2
    assert index.find(bytes(32)) is None


def test_depth_costs_its_logarithm() -> None:
    class Counting(NameTable):
        asked = 0

        def find(self, name: bytes) -> int | None:
            self.asked += 1
            return super().find(name)

    prompt = chain(range(4 * 4096))
    index = index_of(prompt, blocks=4096)
    counting = Counting(4096)
    for block in range(4096):
        counting.add(block, index.name(block))
    index._names = counting
    assert len(index.match(prompt)) == 4096
    assert counting.asked <= 13


def test_a_chain_says_what_does_not_fit() -> None:
    with pytest.raises(InvalidRequest, match="has 2 names"):
        Chain(ROOTS[0], bytes(32), bytes(32), SIZE)


def test_names_are_those_of_the_nodes() -> None:
    from baton.block_hash import chain as one_by_one

    tokens, root = [5, 70000, 2**32 - 1, 0, 1, 2, 3, 4, 9], BlockHash(bytes(range(32)))
    assert chain_names(root, pack_tokens(tokens), SIZE) == b"".join(one_by_one(root, tokens, SIZE))
    assert chain_names(root, b"", SIZE) == b""
