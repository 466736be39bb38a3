"""What the disk's journal says: which slot of the file holds which block. One record an entry, each
sealed with the check of the one before it; so a journal is read up to the first record that is not
what was written after the others, and nothing that stands behind it, of before or of another file,
is taken for its continuation.

    slot u32 | number u32 | XXH3 of the block u64 | parent 32 | name 32 | tokens 4 each, big endian | check u64

A slot's last record counts. Whether the slot really holds that block is found out by its XXH3 when
it is read.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from baton.kv.block_hash import TOKEN_BYTES, BlockHash
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT

_HEAD = struct.Struct("<IIQ32s32s")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """`depth`: how many blocks precede it in its prompt; `parent_hash`: the name of the last of
    them, or the root."""

    slot: int
    depth: int
    checksum: int
    parent_hash: bytes
    block_hash: bytes
    packed_tokens: bytes


def record_size(block_size: int) -> int:
    return _HEAD.size + block_size * TOKEN_BYTES + _CHECKSUM.size


def record_checksum(record: bytes) -> int:
    """What the next record is sealed with."""
    return int(_CHECKSUM.unpack_from(record, len(record) - _CHECKSUM.size)[0])


def encode_record(entry: JournalEntry, before: int) -> bytes:
    """The record that follows one whose check is `before`; for the first, that is the file's own
    number."""
    body = (
        _HEAD.pack(entry.slot, entry.depth, entry.checksum, entry.parent_hash, entry.block_hash)
        + entry.packed_tokens
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, before))


def decode_records(
    records: Iterable[bytes], block_size: int, before: int
) -> Iterator[tuple[JournalEntry, int]]:
    """Up to the first record that does not verify: what each says, and its check."""
    size = record_size(block_size)
    for record in records:
        body = record[: -_CHECKSUM.size]
        if len(record) != size or xxhash.xxh3_64_intdigest(body, before) != record_checksum(record):
            return
        before = record_checksum(record)
        slot, number, checksum, parent, name = _HEAD.unpack_from(body)
        yield JournalEntry(slot, number, checksum, parent, name, body[_HEAD.size :]), before


def restore_tier(
    tier: CacheTier, entries: Iterable[JournalEntry], now: float
) -> list[JournalEntry]:
    """Fill an empty tier with what a journal says. Returns what was taken; not taken is what was
    overwritten, and what has lost a block before it."""
    last: dict[int, JournalEntry] = {}
    for entry in entries:
        if entry.slot < tier.num_blocks:
            last.pop(entry.slot, None)
            last[entry.slot] = entry
    taken = []
    for entry in sorted(
        reversed(last.values()), key=lambda entry: entry.depth
    ):  # parents first, newer ones first
        parent = tier.index.find_block(entry.parent_hash) if entry.depth else ROOT
        if parent is None or (parent != ROOT and tier.index.depth(parent) + 1 != entry.depth):
            continue
        root = tier.index.root_hash(parent) if parent != ROOT else BlockHash(entry.parent_hash)
        if tier.restore_block(entry.slot, entry.block_hash, entry.packed_tokens, parent, root, now):
            taken.append(entry)
    tier.finish_restore()
    return taken


def make_journal_entry(tier: CacheTier, slot: int, checksum: int) -> JournalEntry:
    """What the journal is to say of a block in the index."""
    index = tier.index
    parent = index.parent(slot)
    before = index.block_hash(parent) if parent != ROOT else index.root_hash(slot)
    return JournalEntry(
        slot, index.depth(slot), checksum, before, index.block_hash(slot), index.packed_tokens(slot)
    )
