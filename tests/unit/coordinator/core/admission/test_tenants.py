"""Tenants: their keys, priorities and cache salts."""

import pytest

from baton.types import Principal
from coordinator.core.admission.tenants import (
    Tenant,
    TenantTable,
    derive_cache_salt,
)
from tests.unit.coordinator.core.admission.tenant_tables import (
    CLASSES,
    make_tenant_table,
)

# who they are


def test_api_key_finds_its_tenant_only() -> None:
    tenants = make_tenant_table(Tenant("a", "standard"), Tenant("b", "batch"))
    found = tenants.find_by_key(b"key of b")
    assert found is not None
    assert found.name == "b"
    assert tenants.find_by_key(b"key of c") is None
    assert TenantTable().find_by_key(b"") is None


@pytest.mark.parametrize(
    ("tenant_class", "priority", "level"),
    [
        ("premium", 0, 0),
        ("premium", 2, 2),
        ("standard", 0, 1),
        ("standard", -5, 1),
        ("batch", 0, 2),
        ("batch", 99, 2),
    ],
)
def test_priority_is_capped_by_the_class(tenant_class: str, priority: int, level: int) -> None:
    standing = make_tenant_table().make_principal(Tenant("t", tenant_class), priority)
    assert (standing.priority_level, standing.tenant_class) == (level, CLASSES[level])


def test_priority_is_ignored_without_tenants_file() -> None:
    assert TenantTable().make_principal(Tenant(), 7) == Principal()


def test_cache_salts_differ_by_tenant() -> None:
    assert len({derive_cache_salt("a"), derive_cache_salt("b"), b""}) == 3
