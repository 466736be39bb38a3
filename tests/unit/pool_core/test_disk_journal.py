"""A journal is believed up to the first record that is not as it was written, and what it says is of one piece."""

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.block_hash import block_hash
from kv_pool.core.disk_journal import Entry, check_of, entry_of, read, record_bytes, restore, seal
from kv_pool.core.eviction import Lru
from kv_pool.core.tier import Tier
from tests.unit.pool_core.prompts import ROOTS, SIZE, fill, of_blocks

SLOTS = 6
GENERATION = 77
RECORD = record_bytes(SIZE)
PROMPTS = st.builds(
    lambda ids, root: of_blocks(*ids, root=root), st.lists(st.integers(1, 2), max_size=4), st.sampled_from(ROOTS[:2])
)
ON_ANY_MACHINE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def tier_of(slots: int = SLOTS) -> Tier:
    return Tier(slots, SIZE, Lru(slots))


def written(entries: Sequence[Entry]) -> bytes:
    journal, check = b"", GENERATION
    for entry in entries:
        record = seal(entry, check)
        journal, check = journal + record, check_of(record)
    return journal


def believed(journal: bytes, generation: int = GENERATION) -> list[Entry]:
    records = (journal[at : at + RECORD] for at in range(0, len(journal), RECORD))
    return [entry for entry, _ in read(records, SIZE, generation)]


def history(prompts: Sequence[object]) -> list[Entry]:
    """What a small disk writes while these come and go, each block with a checksum of its own."""
    tier, entries = tier_of(), list[Entry]()
    tier.follow(gained=lambda slot: entries.append(entry_of(tier, slot, 1000 + len(entries))))
    for now, prompt in enumerate(prompts):
        fill(tier, prompt, float(now))  # type: ignore[arg-type]
    return entries


@ON_ANY_MACHINE
@given(st.lists(PROMPTS, max_size=8), st.integers(0, 400))
def test_any_beginning_of_a_journal_restores_what_its_slots_held_then(prompts: list[object], cut: int) -> None:
    entries = history(prompts)
    journal = written(entries)[: cut * 7]
    known = believed(journal)
    assert known == entries[: len(journal) // RECORD]
    tier = tier_of()
    taken = restore(tier, known, 0.0)
    tier.check()
    assert len(taken) == len(tier.index) == SLOTS - tier.num_free
    last = {entry.slot: entry for entry in known}
    for entry in taken:
        assert last[entry.slot] == entry, "a slot that was overwritten is what it was overwritten with"
        assert block_hash(entry.parent, _ids(entry.tokens)) == entry.name == tier.index.name(entry.slot)  # type: ignore[arg-type]
        assert entry_of(tier, entry.slot, entry.checksum) == entry


@ON_ANY_MACHINE
@given(st.lists(PROMPTS, min_size=1, max_size=6), st.data())
def test_a_flipped_bit_ends_it_there(prompts: list[object], data: st.DataObject) -> None:
    entries = history(prompts)
    journal = bytearray(written(entries))
    if not journal:
        return
    bit = data.draw(st.integers(0, 8 * len(journal) - 1))
    journal[bit // 8] ^= 1 << bit % 8
    assert believed(bytes(journal)) == entries[: bit // 8 // RECORD]


def test_records_of_another_file_or_another_place_are_none() -> None:
    entries = history([of_blocks(1, 2, 3)])
    journal = written(entries)
    assert len(believed(journal)) == 3
    assert believed(journal, GENERATION + 1) == []
    assert believed(journal[RECORD:]) == []
    stale = journal[:RECORD] + journal[2 * RECORD :]
    assert believed(stale) == entries[:1]


def test_what_has_lost_a_block_before_it_is_not_restored() -> None:
    first, second, third = history([of_blocks(1, 2, 3)])
    tier = tier_of()
    overwritten = history([of_blocks(7)])[0]
    assert overwritten.slot == first.slot
    assert restore(tier, [first, second, third, overwritten], 0.0) == [overwritten]
    tier.check()


def test_of_two_slots_with_one_block_the_newer_is_taken() -> None:
    (old,) = history([of_blocks(1)])
    new = Entry(old.slot + 1, 0, 5, old.parent, old.name, old.tokens)
    assert restore(tier_of(), [old, new], 0.0) == [new]


def test_slots_beyond_the_file_are_ignored() -> None:
    entries = history([of_blocks(1, 2, 3)])
    assert len(restore(tier_of(2), entries, 0.0)) == 2


def _ids(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4)]
