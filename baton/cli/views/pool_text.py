"""What `baton top` shows of the shared pools: all of them together, and what their nodes made of
them between two statuses."""

from dataclasses import dataclass

from baton.cli.views.counters import sum_counter
from baton.pb.cluster_pb2 import NodeStatus, StatusResponse

_POOL_ROLE = "pool"


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Between two statuses; all 0 when there is only one. Look-ups, blocks, evictions a second;
    `hits` of the look-ups, a share; `lookup_seconds` and `lag_seconds` are means of one look-up and
    of one publication."""

    lookups: float = 0.0
    hits: float = 0.0
    lookup_seconds: float = 0.0
    published: float = 0.0
    lag_seconds: float = 0.0
    evicted: float = 0.0


def compute_pool_rates(before: StatusResponse, now: StatusResponse, seconds: float) -> PoolRates:
    """`seconds` passed between the two, more than 0. A node counts from 0 again when it has
    restarted: it is left out then."""
    known = {node.incarnation: node.stats.counters for node in before.nodes}

    def grown(name: str, **labels: str) -> float:
        pairs = (
            (node.stats.counters, known[node.incarnation])
            for node in now.nodes
            if node.incarnation in known
        )
        return sum(
            max(0.0, sum_counter(new, name, **labels) - sum_counter(old, name, **labels))
            for new, old in pairs
        )

    lookups = grown("baton_pool_lookups_total")
    publications = grown("baton_pool_publications_total")
    return PoolRates(
        lookups=lookups / seconds,
        hits=_ratio(grown("baton_pool_lookups_total", result="hit"), lookups),
        lookup_seconds=_ratio(grown("baton_pool_lookup_seconds_total"), lookups),
        published=grown("baton_pool_published_blocks_total") / seconds,
        lag_seconds=_ratio(grown("baton_pool_publish_lag_seconds_total"), publications),
        evicted=grown("baton_pool_evictions_total") / seconds,
    )


def list_pools(status: StatusResponse) -> list[NodeStatus]:
    return [node for node in status.nodes if node.role == _POOL_ROLE]


def format_pools(status: StatusResponse, speed: PoolRates) -> str:
    """Empty if there is no pool."""
    pools = list_pools(status)
    if not pools:
        return ""
    stats = [pool.stats for pool in pools]
    held = sum(one.blocks_cached + one.blocks_in_use + one.blocks_quarantined for one in stats)
    blocks, pinned = sum(one.blocks_total for one in stats), sum(one.blocks_in_use for one in stats)
    size, pins = (
        sum(sum_counter(one.counters, name) for one in stats)
        for name in ("baton_pool_bytes", "baton_pool_pins")
    )
    asked = f"{speed.lookups:.2f} look-ups/s, {speed.hits:.0%} hits, {speed.lookup_seconds * 1e3:.2f} ms each"
    given = f"{speed.published:.1f} blocks/s published, {speed.lag_seconds * 1e3:.1f} ms each"
    has = (
        f"holds {held} of {blocks} blocks, {size / 1e6:.1f} MB  {pins:.0f} pins on {pinned} blocks"
    )
    return f"pool: {asked}  {given}  {speed.evicted:.1f}/s evicted  {has}"


def _ratio(what: float, of: float) -> float:
    return what / of if of else 0.0
