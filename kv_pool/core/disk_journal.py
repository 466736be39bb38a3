"""What the disk's journal says: which slot of the file holds which block. One record an entry, each sealed with the
check of the one before it; so a journal is read up to the first record that is not what was written after the others,
and nothing that stands behind it, of before or of another file, is taken for its continuation.

    slot u32 | number u32 | XXH3 of the block u64 | parent 32 | name 32 | tokens 4 each, big endian | check u64

A slot's last record counts. Whether the slot really holds that block is found out by its XXH3 when it is read.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from baton.block_hash import TOKEN_BYTES, BlockHash
from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier

_HEAD = struct.Struct("<IIQ32s32s")
_CHECK = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Entry:
    """`number`: how many blocks precede it in its prompt; `parent`: the name of the last of them, or the root."""

    slot: int
    number: int
    checksum: int
    parent: bytes
    name: bytes
    tokens: bytes


def record_bytes(block_size: int) -> int:
    return _HEAD.size + block_size * TOKEN_BYTES + _CHECK.size


def check_of(record: bytes) -> int:
    """What the next record is sealed with."""
    return int(_CHECK.unpack_from(record, len(record) - _CHECK.size)[0])


def seal(entry: Entry, before: int) -> bytes:
    """The record that follows one whose check is `before`; for the first, that is the file's own number."""
    body = _HEAD.pack(entry.slot, entry.number, entry.checksum, entry.parent, entry.name) + entry.tokens
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body, before))


def read(records: Iterable[bytes], block_size: int, before: int) -> Iterator[tuple[Entry, int]]:
    """Up to the first record that does not verify: what each says, and its check."""
    size = record_bytes(block_size)
    for record in records:
        body = record[: -_CHECK.size]
        if len(record) != size or xxhash.xxh3_64_intdigest(body, before) != check_of(record):
            return
        before = check_of(record)
        slot, number, checksum, parent, name = _HEAD.unpack_from(body)
        yield Entry(slot, number, checksum, parent, name, body[_HEAD.size :]), before


def restore(tier: Tier, entries: Iterable[Entry], now: float) -> list[Entry]:
    """Fill an empty tier with what a journal says. Returns what was taken; not taken is what was overwritten, and what
    has lost a block before it."""
    last: dict[int, Entry] = {}
    for entry in entries:
        if entry.slot < tier.total:
            last.pop(entry.slot, None)
            last[entry.slot] = entry
    taken = []
    for entry in sorted(reversed(last.values()), key=lambda entry: entry.number):  # parents first, newer ones first
        parent = tier.index.find(entry.parent) if entry.number else ROOT
        if parent is None or (parent != ROOT and tier.index.depth(parent) + 1 != entry.number):
            continue
        root = tier.index.root(parent) if parent != ROOT else BlockHash(entry.parent)
        if tier.restore(entry.slot, entry.name, entry.tokens, parent, root, now):
            taken.append(entry)
    tier.restored()
    return taken


def entry_of(tier: Tier, slot: int, checksum: int) -> Entry:
    """What the journal is to say of a block in the index."""
    index = tier.index
    parent = index.parent(slot)
    before = index.name(parent) if parent != ROOT else index.root(slot)
    return Entry(slot, index.depth(slot), checksum, before, index.name(slot), index.tokens(slot))
