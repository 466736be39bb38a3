"""Who the clients are: a tenant for each key, its class, its share and its limits.

Keys are random and long, so one SHA-256 of a key is as good as a slow hash, and costs a request nothing. The table is
immutable; a reload puts another in its place.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.types import Standing
from coordinator.core.counters import INTERNAL

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight` is its share beside other tenants of its class. Rates are per second, None is no limit; token rates
    count prompt and output. `salt` keeps its cached blocks apart from everybody else's."""

    name: str = "default"
    tenant_class: str = DEFAULT_CLASS
    weight: float = 1.0
    requests_per_second: float | None = None
    request_burst: float = 1.0
    tokens_per_second: float | None = None
    token_burst: float = 1.0
    salt: bytes = b""


OURS = Standing(INTERNAL, INTERNAL)  # of warm-ups and probes
ANYONE = Tenant()  # every client of a cluster without a file of tenants


def salt_of(name: str) -> bytes:
    """Of a tenant's cache: it follows from the name behind the key, so that no request can ask for another's."""
    return hashlib.sha256(b"baton tenant cache\0" + name.encode()).digest()


def hash_key(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Tenants:
    """`classes` in strict order, the first is served first. `reserve` is the share of a node's blocks that only the
    first of several may take; `max_wait` the seconds that a request of a class may be predicted to wait; `headroom` the
    most of a node that a tenant that asks for more than its share leaves to others of its class."""

    classes: tuple[str, ...] = (DEFAULT_CLASS,)
    tenants: Mapping[str, Tenant] = field(default_factory=lambda: {ANYONE.name: ANYONE})
    keys: tuple[tuple[bytes, str], ...] = ()  # digest, tenant
    reserve: float = 0.0
    max_wait: Mapping[str, float] = field(default_factory=dict)
    headroom: float = 0.0

    def find(self, key: bytes) -> Tenant | None:
        """Whose key it is. Every digest is looked at, in constant time."""
        digest, found = hash_key(key), ""
        for known, tenant in self.keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        return self.tenants.get(found)

    def standing(self, tenant: Tenant, priority: int = 0) -> Standing:
        """`priority` asks for a place in the order of classes, 0 is first: a tenant gets its own class's, or a later
        one that it asks for."""
        own = self.classes.index(tenant.tenant_class) if tenant.tenant_class in self.classes else len(self.classes) - 1
        level = min(max(own, priority), len(self.classes) - 1)
        return Standing(tenant.name, self.classes[level], level)

    def get(self, name: str) -> Tenant:
        """Of a request that is here; its tenant may have been taken off the file meanwhile."""
        return self.tenants.get(name, ANYONE)
