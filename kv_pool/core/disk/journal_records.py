"""Records of the disk's journal, which says which slot of the file holds which block.

    field       bytes                meaning
    slot        4                    slot of the disk's file
    depth       4                    number of blocks before this one in its prompt
    checksum    8                    XXH3 of the block's content
    parent      32                   hash of the block before it; for a first block, the root hash
    block hash  32
    tokens      4 each, big endian
    check       8                    XXH3 of the record, seeded with the check of the record before

Numbers are little endian unless noted. Because each check depends on all records before it, a
journal is valid up to the first record that does not verify; later bytes, left from an earlier
journal or from another file, are never taken for its continuation. The last record of a slot
counts. Whether the slot really holds that block is verified by its checksum when it is read.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from baton.kv.blocks import TOKEN_BYTES, BlockHash
from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT

_HEAD = struct.Struct("<IIQ32s32s")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A record of the journal: which block a slot of the disk holds."""

    slot: int
    depth: int  # number of blocks before this one in its prompt
    checksum: int  # XXH3 of the block's content
    parent_hash: bytes  # hash of the block before it; for a first block, the root hash
    block_hash: bytes
    packed_tokens: bytes


def record_size(block_size: int) -> int:
    """Return the bytes of one record, for blocks of `block_size` tokens."""
    return _HEAD.size + block_size * TOKEN_BYTES + _CHECKSUM.size


def record_checksum(record: bytes) -> int:
    """Return the check of a record, which seeds that of the next one."""
    return int(_CHECKSUM.unpack_from(record, len(record) - _CHECKSUM.size)[0])


def encode_record(entry: JournalEntry, previous_check: int) -> bytes:
    """Encode the record that follows one with `previous_check`.

    For the first record, `previous_check` is the generation of the disk's file.
    """
    body = (
        _HEAD.pack(entry.slot, entry.depth, entry.checksum, entry.parent_hash, entry.block_hash)
        + entry.packed_tokens
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, previous_check))


def decode_records(
    records: Iterable[bytes], block_size: int, previous_check: int
) -> Iterator[tuple[JournalEntry, int]]:
    """Yield the entry and the check of each record, up to the first that does not verify."""
    size = record_size(block_size)
    for record in records:
        body = record[: -_CHECKSUM.size]
        check = xxhash.xxh3_64_intdigest(body, previous_check)
        if len(record) != size or check != record_checksum(record):
            return
        previous_check = check
        slot, depth, checksum, parent_hash, block_hash = _HEAD.unpack_from(body)
        tokens = body[_HEAD.size :]
        yield JournalEntry(slot, depth, checksum, parent_hash, block_hash, tokens), check


def restore_tier(
    tier: CacheTier, entries: Iterable[JournalEntry], now: float
) -> list[JournalEntry]:
    """Fill an empty tier from a journal's entries; returns the entries that were restored.

    Entries that a later one of the same slot replaces are skipped, and so are blocks of which a
    block before them is missing.
    """
    latest: dict[int, JournalEntry] = {}
    for entry in entries:
        if entry.slot < tier.num_blocks:
            latest.pop(entry.slot, None)
            latest[entry.slot] = entry
    restored = []
    # Parents first; among blocks of one depth, the newest first.
    for entry in sorted(reversed(latest.values()), key=lambda entry: entry.depth):
        parent = tier.index.find_block(entry.parent_hash) if entry.depth else ROOT
        if parent is None or (parent != ROOT and tier.index.paths.depth(parent) + 1 != entry.depth):
            continue
        root = tier.index.root_hash(parent) if parent != ROOT else BlockHash(entry.parent_hash)
        if tier.restore_block(entry.slot, entry.block_hash, entry.packed_tokens, parent, root, now):
            restored.append(entry)
    tier.finish_restore()
    return restored


def make_journal_entry(tier: CacheTier, slot: int, checksum: int) -> JournalEntry:
    """Build the journal entry of a block in the index."""
    index = tier.index
    parent = index.paths.parent(slot)
    return JournalEntry(
        slot=slot,
        depth=index.paths.depth(slot),
        checksum=checksum,
        parent_hash=index.block_hash(parent) if parent != ROOT else index.root_hash(slot),
        block_hash=index.block_hash(slot),
        packed_tokens=index.tokens.get_tokens(slot),
    )
