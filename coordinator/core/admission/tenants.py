"""Tenants: who the clients are, with their keys, classes, shares and limits.

Keys are random and long, so one SHA-256 of a key is as good as a slow hash, and cheap. The table is
immutable; a reload replaces it.

`TenantShares` tracks what each tenant of a class got recently, and whether it asks for more than
its share. A tenant that does leaves headroom: it gets none of the last few slots of a node, so that
others find one when they arrive. This is trunk reservation, which keeps a stream's blocking low for
a small part of the capacity (Kelly, "Loss Networks", The Annals of Applied Probability, 1991).
Queue order alone cannot do that: if one tenant takes every free slot, the others wait until a
request ends.

Rejected requests count as demand, because by what it got alone a tenant that floods a busy cluster
hardly differs from one that is ahead of its share by chance.

Two windows must agree that a tenant asks for more: the long one tells a flood from chance, and the
short one notices within seconds that it is over (multiwindow alerts; Beyer et al., "The Site
Reliability Workbook", 2018, chapter 5). The short one counts arrivals, because a backlog is served
long after its tenant has stopped.

`TokenBucket` is charged afterwards (Turner, "New Directions in Communications", 1986). A request is
admitted while the bucket holds at least one token, and may leave it in debt. So a request larger
than the burst is served, and its tenant waits longer for the next one.
"""

import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import Principal
from coordinator.core.common.counters import INTERNAL_CLASS
from coordinator.core.estimates.workload import WINDOW_SECONDS, RecentWork

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Rates are per second; None is no limit. Token rates count prompt and output."""

    name: str = "default"
    tenant_class: str = DEFAULT_CLASS
    weight: float = 1.0  # its share, relative to other tenants of its class
    requests_per_second: float | None = None
    request_burst: float = 1.0
    tokens_per_second: float | None = None
    token_burst: float = 1.0
    cache_salt: bytes = b""  # separates its cached blocks from those of other tenants


INTERNAL_PRINCIPAL = Principal(INTERNAL_CLASS, INTERNAL_CLASS)  # of warm-ups and probes
DEFAULT_TENANT = Tenant()  # every client of a cluster without a tenants file


def derive_cache_salt(name: str) -> bytes:
    """Derive the salt of a tenant's cache from its name: no request can choose another's."""
    return hashlib.sha256(b"baton tenant cache\0" + name.encode()).digest()


def hash_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All tenants, their API keys, and the classes in order of priority."""

    classes: tuple[str, ...] = (DEFAULT_CLASS,)  # in strict priority order
    by_name: Mapping[str, Tenant] = field(
        default_factory=lambda: {DEFAULT_TENANT.name: DEFAULT_TENANT}
    )
    key_digests: tuple[tuple[bytes, str], ...] = ()  # digest, tenant
    reserved_share: float = 0.0  # share of a node that only the first of several classes may take
    # longest predicted wait at admission, by class
    max_wait_seconds: Mapping[str, float] = field(default_factory=dict)
    headroom_share: float = 0.0  # most of a node that a tenant above its share leaves to others

    def find_by_key(self, key: bytes) -> Tenant | None:
        """Return the tenant of a key. All digests are compared, in constant time."""
        digest, found = hash_key(key), ""
        for known, tenant in self.key_digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return self.by_name.get(found)

    def make_principal(self, tenant: Tenant, priority: int = 0) -> Principal:
        """Return the tenant's principal; `priority` may ask for a lower class than its own."""
        own = (
            self.classes.index(tenant.tenant_class)
            if tenant.tenant_class in self.classes
            else len(self.classes) - 1
        )
        level = min(max(own, priority), len(self.classes) - 1)
        return Principal(tenant.name, self.classes[level], level)

    def get_tenant(self, name: str) -> Tenant:
        """Return the tenant of a running request, or the default if it was removed meanwhile."""
        return self.by_name.get(name, DEFAULT_TENANT)


SHORT_WINDOW_SECONDS = 2.0  # a tenant at ten times its share that stops counts as stopped after 5 s
_SHARE_SLACK = 1.4  # times a share: tenants that ask for the same differ by less by chance
_FULL_HEADROOM_SHARE = 1.25  # times a share: a tenant that got so much leaves the full headroom


@dataclass(slots=True)
class _PendingCharge:
    """Charges of a tenant that are not in the sums yet."""

    weight: float = 1.0
    cost: float = 0.0
    placements: int = 0
    charged_at: float = 0.0  # time of the last charge


class TenantShares:
    """The shares of one class. A tenant counts for WINDOW_SECONDS after it was last charged.
    Charges are summed up lazily, because every token is charged."""

    def __init__(self) -> None:
        self._served = RecentWork()
        self._refused = RecentWork()
        self._placements = RecentWork()  # requests that were placed
        # expected cost of the requests that arrived, rejected ones included
        self._arrived = RecentWork(SHORT_WINDOW_SECONDS)
        self._pending_charges: dict[str, _PendingCharge] = {}  # not in the sums yet
        # weights of the tenants that count; the one that was served longest ago comes first
        self._weights: dict[str, float] = {}
        self._last_charged_at: dict[str, float] = {}
        self._total_weight = 0.0  # of all of them
        self._settled_at = -math.inf  # when the sums were last brought up to date
        # Headroom shares computed at that time, by tenant and maximum. Many requests of few tenants
        # ask for theirs at the same moment.
        self._headroom_shares: dict[tuple[str, float], float] = {}

    def charge_tenant(
        self, tenant: str, weight: float, cost: float, now: float, *, placements: int = 0
    ) -> None:
        pending = self._pending_charges.get(tenant)
        if pending is None:
            pending = self._pending_charges[tenant] = _PendingCharge()
        pending.weight, pending.charged_at = weight, now
        pending.cost += cost
        pending.placements += placements

    def record_arrivals(self, tenant: str, count: int, now: float) -> None:
        """Count new requests, each with the mean cost of the tenant's placed requests."""
        self._settle_charges(now)
        placements = self._placements.get_work(tenant)
        if placements:
            self._arrived.add_work(tenant, count * self._served.get_work(tenant) / placements, now)
            self._headroom_shares.clear()

    def record_rejections(self, tenant: str, count: int, now: float) -> None:
        """Count requests that were rejected for lack of room, each at the mean cost."""
        self.record_arrivals(tenant, count, now)
        placements = self._placements.get_work(tenant)
        if placements:
            self._refused.add_work(tenant, count * self._served.get_work(tenant) / placements, now)
            self._headroom_shares.clear()

    def headroom_share(self, tenant: str, max_share: float, now: float) -> float:
        """Return the share of a node that the tenant must leave: 0 unless it asks for more than its
        fair share and has it; then it grows, up to `max_share` and to what the others have had."""
        self._settle_charges(now)
        share = self._headroom_shares.get((tenant, max_share))
        if share is None:
            share = self._compute_headroom_share(tenant, max_share)
            self._headroom_shares[tenant, max_share] = share
        return share

    def _compute_headroom_share(self, tenant: str, max_share: float) -> float:
        if len(self._weights) < 2 or tenant not in self._weights:
            return 0.0
        fair = self._weights[tenant] / self._total_weight
        demanded, all_demanded = (
            self._served.get_work(tenant) + self._refused.get_work(tenant),
            self._served.total_work + self._refused.total_work,
        )
        arrived, all_arrived = self._arrived.get_work(tenant), self._arrived.total_work
        if (
            demanded <= _SHARE_SLACK * fair * all_demanded
            or arrived <= _SHARE_SLACK * fair * all_arrived
        ):
            return 0.0
        served_share = self._served.get_work(tenant) / self._served.total_work
        excess = (served_share / fair - 1.0) / (_FULL_HEADROOM_SHARE - 1.0)
        return min(max_share, 1.0 - served_share) * min(1.0, max(0.0, excess))

    def _settle_charges(self, now: float) -> None:
        """Forget tenants not served recently, and add pending charges as of their time."""
        if now == self._settled_at and not self._pending_charges:
            return
        self._settled_at = now
        self._headroom_shares.clear()
        for each in (self._served, self._refused, self._placements, self._arrived):
            each.rescale(now)
        self._forget_before(now - WINDOW_SECONDS)
        if len(self._weights) == 1 and self._pending_charges.keys() - self._weights.keys():
            self._forget_tenant(
                *self._weights
            )  # work served while it was alone took nothing from others
        for tenant, pending in sorted(
            self._pending_charges.items(), key=lambda item: item[1].charged_at
        ):
            self._total_weight += pending.weight - self._weights.pop(tenant, 0.0)
            self._weights[tenant], self._last_charged_at[tenant] = (
                pending.weight,
                pending.charged_at,
            )
            self._served.add_work(tenant, pending.cost, pending.charged_at)
            self._placements.add_work(tenant, pending.placements, pending.charged_at)
        self._pending_charges.clear()
        self._forget_before(now - WINDOW_SECONDS)

    def _forget_before(self, then: float) -> None:
        while self._weights and self._last_charged_at[first := next(iter(self._weights))] < then:
            self._total_weight -= self._weights.pop(first)
            del self._last_charged_at[first]
            self._forget_tenant(first)
        if not self._weights:
            self._total_weight = 0.0

    def _forget_tenant(self, tenant: str) -> None:
        for each in (self._served, self._refused, self._placements, self._arrived):
            each.remove_key(tenant)


_ROUNDING = 1e-9  # error of floating point


@dataclass(slots=True)
class TokenBucket:
    """Refills at `rate` a second up to `burst`; full at first."""

    rate: float
    burst: float
    level: float
    updated_at: float

    @classmethod
    def make_full(cls, rate: float, burst: float, now: float) -> "TokenBucket":
        return cls(rate, burst, burst, now)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds until the next admission; 0 is now."""
        self._refill(now)
        lacking = min(1.0, self.burst) - self.level
        return lacking / self.rate if lacking > _ROUNDING else 0.0

    def charge_tokens(self, amount: float, now: float) -> None:
        """Take tokens out; a negative amount is a refund."""
        self._refill(now)
        self.level = min(self.burst, self.level - amount)

    def set_limits(self, rate: float, burst: float, now: float) -> None:
        """Change the limits; debt is kept."""
        self._refill(now)
        self.rate, self.burst, self.level = rate, burst, min(self.level, burst)

    def _refill(self, now: float) -> None:
        self.level = min(self.burst, self.level + self.rate * max(0.0, now - self.updated_at))
        self.updated_at = max(self.updated_at, now)
