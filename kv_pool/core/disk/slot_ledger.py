"""The ledger of the slots of a disk."""

from collections.abc import Collection, Mapping

from kv_pool.core.blocks.cache_tier import CacheTier
from kv_pool.core.index.radix_index import ROOT
from kv_pool.core.ledger import PoolBlockState, PoolLedger, PoolLedgerEntry

# Owners in the ledger, as operators see them.
DISK_WRITER = "disk"
DISK_READER = "arrivals"


def build_slot_ledger(
    tier: CacheTier, loads: Mapping[int, float], writing: Collection[int], now: float
) -> PoolLedger:
    """Build the ledger of a disk; IN_USE counts whole paths, as in memory.

    `loads` maps the last slot of each path that is being read to the time, in seconds, when the
    load started; `writing` has the slots that are not written yet.
    """
    reading: set[int] = set()
    for slot in loads:
        while slot != ROOT and slot not in reading:
            reading.add(slot)
            slot = tier.index.paths.parent(slot)
    unwritten = {slot for slot in writing if slot in tier.index} - reading
    counts = dict.fromkeys(PoolBlockState, 0) | {
        PoolBlockState.FREE: len(tier.free_list),
        PoolBlockState.IN_USE: len(reading),
        PoolBlockState.WRITING: len(unwritten),
        PoolBlockState.CACHED: len(tier.index) - len(reading) - len(unwritten),
    }
    entries = []
    if reading:
        age = now - min(loads.values())
        entries.append(PoolLedgerEntry(DISK_READER, PoolBlockState.IN_USE, len(reading), age))
    if unwritten:
        entries.append(PoolLedgerEntry(DISK_WRITER, PoolBlockState.WRITING, len(unwritten), 0.0))
    return PoolLedger(tier.num_blocks, counts, tuple(entries))
