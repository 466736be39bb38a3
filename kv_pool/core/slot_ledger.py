"""The account of a disk's slots."""

from collections.abc import Collection, Mapping

from kv_pool.core.ledger import LedgerEntry, PoolLedger, PoolState
from kv_pool.core.radix_index import ROOT
from kv_pool.core.tier import Tier

WRITER = "disk"
READER = "arrivals"


def slot_ledger(tier: Tier, loads: Mapping[int, float], writing: Collection[int], now: float) -> PoolLedger:
    """`loads`: the last slot of each path that is being read, and since when; `writing`: slots that are not written
    yet. IN_USE counts paths, as in memory."""
    read: set[int] = set()
    for slot in loads:
        while slot != ROOT and slot not in read:
            read.add(slot)
            slot = tier.index.parent(slot)
    written = {slot for slot in writing if slot in tier.index} - read
    counts = dict.fromkeys(PoolState, 0) | {
        PoolState.FREE: tier.num_free,
        PoolState.IN_USE: len(read),
        PoolState.WRITING: len(written),
        PoolState.CACHED: len(tier.index) - len(read) - len(written),
    }
    entries = []
    if read:
        entries.append(LedgerEntry(READER, PoolState.IN_USE, len(read), now - min(loads.values())))
    if written:
        entries.append(LedgerEntry(WRITER, PoolState.WRITING, len(written), 0.0))
    return PoolLedger(tier.total, counts, tuple(entries))
