"""The account of a disk's slots."""

from collections.abc import Collection, Mapping

from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT
from kv_pool.core.ledger import PoolBlockState, PoolLedger, PoolLedgerEntry

DISK_WRITER = "disk"
DISK_READER = "arrivals"


def build_slot_ledger(
    tier: CacheTier, loads: Mapping[int, float], writing: Collection[int], now: float
) -> PoolLedger:
    """`loads`: the last slot of each path that is being read, and since when; `writing`: slots that
    are not written yet. IN_USE counts paths, as in memory."""
    read: set[int] = set()
    for slot in loads:
        while slot != ROOT and slot not in read:
            read.add(slot)
            slot = tier.index.parent(slot)
    written = {slot for slot in writing if slot in tier.index} - read
    counts = dict.fromkeys(PoolBlockState, 0) | {
        PoolBlockState.FREE: tier.num_free,
        PoolBlockState.IN_USE: len(read),
        PoolBlockState.WRITING: len(written),
        PoolBlockState.CACHED: len(tier.index) - len(read) - len(written),
    }
    entries = []
    if read:
        entries.append(
            PoolLedgerEntry(
                DISK_READER, PoolBlockState.IN_USE, len(read), now - min(loads.values())
            )
        )
    if written:
        entries.append(PoolLedgerEntry(DISK_WRITER, PoolBlockState.WRITING, len(written), 0.0))
    return PoolLedger(tier.num_blocks, counts, tuple(entries))
