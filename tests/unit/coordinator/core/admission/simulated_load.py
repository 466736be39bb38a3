"""Simulated clusters for tests of admission; a node serves about 25 requests a second."""

from typing import TypedDict

from coordinator.core.admission.tenants import Tenant, TenantTable, derive_cache_salt
from node_engine.paced.costs import PacedCosts
from simulator.scheduler_cluster import SchedulerCluster

SLOW_COSTS = PacedCosts(
    prefill_us_per_token=400.0, decode_base_us=4000.0, decode_us_per_sequence=500.0
)


class RequestLengths(TypedDict):
    prompt_tokens: int
    output_tokens: int


class VariedLengths(RequestLengths):
    vary_outputs: bool  # uniform around `output_tokens`


REQUEST_LENGTHS = RequestLengths(prompt_tokens=64, output_tokens=16)
VARIED_LENGTHS = VariedLengths(prompt_tokens=64, output_tokens=16, vary_outputs=True)


def make_tenants(
    reserve: float = 0.3, max_wait: float | None = None, **classes: str
) -> TenantTable:
    made = {
        name: Tenant(name, tenant_class, cache_salt=derive_cache_salt(name))
        for name, tenant_class in classes.items()
    }
    waits = {} if max_wait is None else dict.fromkeys(("premium", "standard", "batch"), max_wait)
    return TenantTable(("premium", "standard", "batch"), made, (), reserve, waits)


def make_cluster(known: TenantTable | None = None, **settings: object) -> SchedulerCluster:
    return SchedulerCluster(
        tenants=known,
        max_num_seqs=16,
        costs=SLOW_COSTS,
        **settings,  # type: ignore[arg-type]
    )


def completion_rate(cluster: SchedulerCluster, since: float, until: float) -> float:
    done = [
        each
        for each in cluster.accepted_requests
        if each.is_done and each.ended_at and since <= each.ended_at < until
    ]
    return len(done) / (until - since)
