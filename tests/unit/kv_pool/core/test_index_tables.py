"""The index's tables against dictionaries and lists, under random insertions and removals."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool.core.index.block_hash_table import BlockHashTable
from kv_pool.core.index.path_table import ROOT, PathTable
from kv_pool.core.index.token_table import TokenTable
from tests.unit.kv_pool.core.chains import make_block_chain


def make_hash(home: int, number: int) -> bytes:
    """Names with equal `home` want the same place of a small table."""
    return number.to_bytes(7, "big") + bytes([home]) + bytes(24)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60), st.integers(1, 12))
def test_hash_table_finds_entries_through_collisions(
    steps: list[tuple[int, int]], blocks: int
) -> None:
    """Homes at the end of the table wrap around."""
    table, model = BlockHashTable(blocks), dict[bytes, int]()
    free = list(range(blocks))
    for home, number in steps:
        wanted = make_hash(255 - home, number)
        if wanted in model:
            table.remove_block(model[wanted])
            free.append(model.pop(wanted))
        elif free:
            model[wanted] = free.pop(0)
            assert table.add_block(model[wanted], wanted)
            assert not table.add_block(blocks, wanted)
        assert len(table) == len(model)
        assert sorted(table.blocks()) == sorted(model.values())
        for other in {make_hash(255 - one, two) for one, two in steps}:
            assert table.find_block(other) == model.get(other)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=400),
    st.lists(st.integers(0, 400), max_size=200),
)
def test_path_follows_the_parents(choices: list[int], removals: list[int]) -> None:
    """A tree of any shape, from one long path to all first blocks; then leaves go, and their places
    are used again."""
    table, paths = PathTable(len(choices)), dict[int, list[int]]()

    def add(block: int, choice: int) -> None:
        parent = sorted(paths)[-choice] if 0 < choice <= len(paths) else ROOT
        table.add_block(block, parent)
        paths[block] = [*paths.get(parent, []), block]

    for block, choice in enumerate(choices):
        add(block, 1 if choice > 60 else choice)  # mostly behind the last one
    for choice in removals:
        leaves = [
            block for block in paths if not any(path[-2:-1] == [block] for path in paths.values())
        ]
        block = leaves[choice % len(leaves)]
        assert table.remove_block(block) == (paths[block][-2] if len(paths[block]) > 1 else ROOT)
        assert block not in table
        del paths[block]
        add(block, choice)
    for block, path in paths.items():
        assert list(table.path(block)) == path
        assert table.depth(block) == len(path) - 1


def test_first_difference_ends_the_token_match() -> None:
    prompt = make_block_chain(1, 2, 3, 4)
    table = TokenTable(8, 4)
    path = array("i", [5, 0, 7, 2])
    for number, block in enumerate(path):
        table.set_tokens(block, prompt.block_tokens(number))
    assert table.count_matching_blocks(path, prompt.packed_tokens) == 4
    for wrong in range(16):
        tokens = bytearray(prompt.packed_tokens)
        tokens[wrong * 4] ^= 1
        assert table.count_matching_blocks(path, bytes(tokens)) == wrong // 4
    assert table.count_matching_blocks(array("i"), prompt.packed_tokens) == 0
