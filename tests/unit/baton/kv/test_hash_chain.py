"""Block hashes are those of one block after the other, however they are asked for."""

from collections.abc import Sequence

import pytest

from baton.kv.blocks import BlockHash, HashChain, iter_block_hashes

ROOT = BlockHash(bytes(range(32)))


@pytest.mark.parametrize("order", [range(40), range(39, -1, -1), [20, 3, 39, 39]])
def test_hashes_of_a_chain_do_not_depend_on_the_order_of_questions(order: Sequence[int]) -> None:
    tokens = list(range(40 * 16 + 5))
    expected = list(iter_block_hashes(ROOT, tokens, 16))
    chain = HashChain(ROOT, tokens, 16)
    for block in order:
        assert chain.block_hash(block) == expected[block]
        assert chain.parent_hash(block) == (expected[block - 1] if block else ROOT)


def test_a_chain_grows_with_its_tokens() -> None:
    tokens = list(range(24))
    chain = HashChain(ROOT, tokens, 16)
    chain.compute_hashes(99)  # one block is full
    with pytest.raises(IndexError):
        chain.block_hash(1)
    tokens.extend(range(24, 64))
    assert [chain.block_hash(block) for block in range(4)] == list(
        iter_block_hashes(ROOT, tokens, 16)
    )
    assert chain.packed_prefix(4)[0] == b"".join(iter_block_hashes(ROOT, tokens, 16))
