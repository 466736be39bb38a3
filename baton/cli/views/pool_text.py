"""The line of `baton top` about the shared pools: their totals, and rates between statuses."""

from dataclasses import dataclass

from baton.cli.views.counters import sum_counter
from baton.pb.cluster_pb2 import NodeStatus, StatusResponse

_POOL_ROLE = "pool"


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Rates between two statuses; all 0 when there is only one."""

    lookups: float = 0.0  # per second
    hits: float = 0.0  # share of the look-ups, 0 to 1
    lookup_seconds: float = 0.0  # mean of one look-up
    published: float = 0.0  # blocks per second
    lag_seconds: float = 0.0  # mean of one publication
    evicted: float = 0.0  # blocks per second


def compute_pool_rates(before: StatusResponse, now: StatusResponse, seconds: float) -> PoolRates:
    """Return the rates over the `seconds` (more than 0) between two statuses.

    A node that restarted meanwhile is left out, because its counters began at 0 again.
    """
    previous_counters = {node.incarnation: node.stats.counters for node in before.nodes}

    def increase(name: str, **labels: str) -> float:
        pairs = (
            (node.stats.counters, previous_counters[node.incarnation])
            for node in now.nodes
            if node.incarnation in previous_counters
        )
        return sum(
            max(0.0, sum_counter(new, name, **labels) - sum_counter(old, name, **labels))
            for new, old in pairs
        )

    lookups = increase("baton_pool_lookups_total")
    publications = increase("baton_pool_publications_total")
    return PoolRates(
        lookups=lookups / seconds,
        hits=_ratio(increase("baton_pool_lookups_total", result="hit"), lookups),
        lookup_seconds=_ratio(increase("baton_pool_lookup_seconds_total"), lookups),
        published=increase("baton_pool_published_blocks_total") / seconds,
        lag_seconds=_ratio(increase("baton_pool_publish_lag_seconds_total"), publications),
        evicted=increase("baton_pool_evictions_total") / seconds,
    )


def list_pools(status: StatusResponse) -> list[NodeStatus]:
    return [node for node in status.nodes if node.role == _POOL_ROLE]


def format_pools(status: StatusResponse, rates: PoolRates) -> str:
    """Return the line about all pools, empty if there is no pool."""
    pools = list_pools(status)
    if not pools:
        return ""
    stats = [pool.stats for pool in pools]
    used_blocks = sum(
        pool_stats.blocks_cached + pool_stats.blocks_in_use + pool_stats.blocks_quarantined
        for pool_stats in stats
    )
    blocks, pinned = (
        sum(pool_stats.blocks_total for pool_stats in stats),
        sum(pool_stats.blocks_in_use for pool_stats in stats),
    )
    size, pins = (
        sum(sum_counter(pool_stats.counters, name) for pool_stats in stats)
        for name in ("baton_pool_bytes", "baton_pool_pins")
    )
    lookups = (
        f"{rates.lookups:.2f} look-ups/s, {rates.hits:.0%} hits, "
        f"{rates.lookup_seconds * 1e3:.2f} ms each"
    )
    publications = (
        f"{rates.published:.1f} blocks/s published, {rates.lag_seconds * 1e3:.1f} ms each"
    )
    contents = (
        f"holds {used_blocks} of {blocks} blocks, {size / 1e6:.1f} MB  "
        f"{pins:.0f} pins on {pinned} blocks"
    )
    return f"pool: {lookups}  {publications}  {rates.evicted:.1f}/s evicted  {contents}"


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0
