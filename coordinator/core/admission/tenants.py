"""Tenants: who the clients are, with their keys, classes, shares and limits.

Keys are random and long, so one SHA-256 of a key is as good as a slow hash, and cheap. The table is
immutable; a reload replaces it.
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
    """All tenants and classes."""

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
