"""Who the clients are: a tenant for each key, its class, its share and its limits.

Keys are random and long, so one SHA-256 of a key is as good as a slow hash, and costs a request
nothing. The table is immutable; a reload puts another in its place.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import Principal
from coordinator.core.common.counters import INTERNAL_CLASS

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight` is its share beside other tenants of its class. Rates are per second, None is no
    limit; token rates count prompt and output. `cache_salt` keeps its cached blocks apart from
    everybody else's."""

    name: str = "default"
    tenant_class: str = DEFAULT_CLASS
    weight: float = 1.0
    requests_per_second: float | None = None
    request_burst: float = 1.0
    tokens_per_second: float | None = None
    token_burst: float = 1.0
    cache_salt: bytes = b""


INTERNAL_PRINCIPAL = Principal(INTERNAL_CLASS, INTERNAL_CLASS)  # of warm-ups and probes
DEFAULT_TENANT = Tenant()  # every client of a cluster without a file of tenants


def derive_cache_salt(name: str) -> bytes:
    """Of a tenant's cache: it follows from the name behind the key, so that no request can ask for
    another's."""
    return hashlib.sha256(b"baton tenant cache\0" + name.encode()).digest()


def hash_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class TenantTable:
    """`classes` in strict order, the first is served first. `reserved_share` is the share of a
    node's blocks that only the first of several may take; `max_wait_seconds` the seconds that a
    request of a class may be predicted to wait; `headroom_share` the most of a node that a tenant
    that asks for more than its share leaves to others of its class."""

    classes: tuple[str, ...] = (DEFAULT_CLASS,)
    by_name: Mapping[str, Tenant] = field(
        default_factory=lambda: {DEFAULT_TENANT.name: DEFAULT_TENANT}
    )
    key_digests: tuple[tuple[bytes, str], ...] = ()  # digest, tenant
    reserved_share: float = 0.0
    max_wait_seconds: Mapping[str, float] = field(default_factory=dict)
    headroom_share: float = 0.0

    def find_by_key(self, key: bytes) -> Tenant | None:
        """Whose key it is. Every digest is looked at, in constant time."""
        digest, found = hash_key(key), ""
        for known, tenant in self.key_digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        return self.by_name.get(found)

    def make_principal(self, tenant: Tenant, priority: int = 0) -> Principal:
        """`priority` asks for a place in the order of classes, 0 is first: a tenant gets its own
        class's, or a later one that it asks for."""
        own = (
            self.classes.index(tenant.tenant_class)
            if tenant.tenant_class in self.classes
            else len(self.classes) - 1
        )
        level = min(max(own, priority), len(self.classes) - 1)
        return Principal(tenant.name, self.classes[level], level)

    def get_tenant(self, name: str) -> Tenant:
        """Of a request that is here; its tenant may have been taken off the file meanwhile."""
        return self.by_name.get(name, DEFAULT_TENANT)
