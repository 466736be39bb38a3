"""Tables of tenants for the tests of admission."""

from baton.types import Principal
from coordinator.core.admission.tenants import (
    Tenant,
    TenantTable,
    hash_key,
)

CLASSES = ("premium", "standard", "batch")


GOLD, BULK = Principal("gold", "premium", 0), Principal("bulk", "standard", 1)


def make_tenant_table(*made: Tenant, reserve: float = 0.0, **waits: float) -> TenantTable:
    keys = tuple((hash_key(f"key of {one.name}".encode()), one.name) for one in made)
    return TenantTable(CLASSES, {one.name: one for one in made}, keys, reserve, waits)
