"""A journal is believed up to the first record that is not as it was written, and what it says is
of one piece."""

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kv.blocks import BlockHash, block_hash
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.disk.journal_records import (
    JournalEntry,
    decode_records,
    encode_record,
    make_journal_entry,
    record_checksum,
    record_size,
    restore_tier,
)
from kv_pool.core.eviction.evictor import LruEvictor
from tests.unit.kv_pool.core.chains import (
    PROMPT_BLOCK_TOKENS,
    ROOTS,
    insert_chain,
    make_block_chain,
)

SLOTS = 6
GENERATION = 77
RECORD = record_size(PROMPT_BLOCK_TOKENS)
PROMPTS = st.builds(
    lambda ids, root: make_block_chain(*ids, root=root),
    st.lists(st.integers(1, 2), max_size=4),
    st.sampled_from(ROOTS[:2]),
)
ON_ANY_MACHINE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def make_tier(slots: int = SLOTS) -> CacheTier:
    return CacheTier(slots, PROMPT_BLOCK_TOKENS, LruEvictor(slots))


def encode_journal(entries: Sequence[JournalEntry]) -> bytes:
    journal, check = b"", GENERATION
    for entry in entries:
        record = encode_record(entry, check)
        journal, check = journal + record, record_checksum(record)
    return journal


def decode_journal(journal: bytes, generation: int = GENERATION) -> list[JournalEntry]:
    records = (journal[at : at + RECORD] for at in range(0, len(journal), RECORD))
    return [entry for entry, _ in decode_records(records, PROMPT_BLOCK_TOKENS, generation)]


def record_insertions(prompts: Sequence[object]) -> list[JournalEntry]:
    """What a small disk writes while these come and go, each block with a checksum of its own."""
    tier, entries = make_tier(), list[JournalEntry]()
    tier.add_listeners(
        on_insert=lambda slot: entries.append(make_journal_entry(tier, slot, 1000 + len(entries)))
    )
    for now, prompt in enumerate(prompts):
        insert_chain(tier, prompt, float(now))  # type: ignore[arg-type]
    return entries


@ON_ANY_MACHINE
@given(st.lists(PROMPTS, max_size=8), st.integers(0, 400))
def test_any_journal_prefix_restores_the_slots_of_that_time(
    prompts: list[object], cut: int
) -> None:
    entries = record_insertions(prompts)
    journal = encode_journal(entries)[: cut * 7]
    known = decode_journal(journal)
    assert known == entries[: len(journal) // RECORD]
    tier = make_tier()
    taken = restore_tier(tier, known, 0.0)
    tier.check()
    assert len(taken) == len(tier.index) == SLOTS - len(tier.free_list)
    last = {entry.slot: entry for entry in known}
    for entry in taken:
        assert last[entry.slot] == entry, (
            "a slot that was overwritten is what it was overwritten with"
        )
        assert (
            block_hash(BlockHash(entry.parent_hash), _ids(entry.packed_tokens))
            == entry.block_hash
            == tier.index.block_hash(entry.slot)
        )
        assert make_journal_entry(tier, entry.slot, entry.checksum) == entry


@ON_ANY_MACHINE
@given(st.lists(PROMPTS, min_size=1, max_size=6), st.data())
def test_flipped_bit_ends_the_journal(prompts: list[object], data: st.DataObject) -> None:
    entries = record_insertions(prompts)
    journal = bytearray(encode_journal(entries))
    if not journal:
        return
    bit = data.draw(st.integers(0, 8 * len(journal) - 1))
    journal[bit // 8] ^= 1 << bit % 8
    assert decode_journal(bytes(journal)) == entries[: bit // 8 // RECORD]


def test_records_of_another_file_or_position_are_rejected() -> None:
    entries = record_insertions([make_block_chain(1, 2, 3)])
    journal = encode_journal(entries)
    assert len(decode_journal(journal)) == 3
    assert decode_journal(journal, GENERATION + 1) == []
    assert decode_journal(journal[RECORD:]) == []
    stale = journal[:RECORD] + journal[2 * RECORD :]
    assert decode_journal(stale) == entries[:1]


def test_block_without_its_parent_is_not_restored() -> None:
    first, second, third = record_insertions([make_block_chain(1, 2, 3)])
    tier = make_tier()
    overwritten = record_insertions([make_block_chain(7)])[0]
    assert overwritten.slot == first.slot
    assert restore_tier(tier, [first, second, third, overwritten], 0.0) == [overwritten]
    tier.check()


def test_newer_slot_wins_for_a_duplicate_block() -> None:
    (old,) = record_insertions([make_block_chain(1)])
    new = JournalEntry(old.slot + 1, 0, 5, old.parent_hash, old.block_hash, old.packed_tokens)
    assert restore_tier(make_tier(), [old, new], 0.0) == [new]


def test_slots_beyond_the_file_are_ignored() -> None:
    entries = record_insertions([make_block_chain(1, 2, 3)])
    assert len(restore_tier(make_tier(2), entries, 0.0)) == 2


def _ids(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4)]
