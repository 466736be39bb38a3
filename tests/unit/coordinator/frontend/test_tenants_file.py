"""The file of tenants, and who its keys let in."""

from pathlib import Path
from typing import Any

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError, Unauthenticated
from baton.network.bind_policy import check_coordinator_binds
from coordinator.core.admission.tenants import hash_key
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.tenants_file import load_tenants, parse_tenants

KEY = b"a long and random key"


def tenant(
    name: str = "acme", key: bytes = KEY, *, tenant_class: str | None = None, **fields: Any
) -> dict[str, Any]:
    own_class = {} if tenant_class is None else {"class": tenant_class}
    return {"name": name, "keys": [f"sha256:{hash_key(key).hex()}"], **own_class, **fields}


def test_parse_tenants() -> None:
    data = {
        "max_wait": {"premium": 2},
        "tenants": [
            tenant(tenant_class="premium", weight=2, tokens_per_second=100),
            tenant("jobs", b"another long key", tenant_class="batch", requests_per_second=0.5),
        ],
    }
    tenants = parse_tenants(data)
    assert tenants.classes == ("premium", "standard", "batch")
    assert (tenants.reserved_share, tenants.headroom_share) == (0.3, 0.35)
    assert parse_tenants({**data, "headroom": 0}).headroom_share == 0.0
    assert tenants.max_wait_seconds == {"premium": 2.0}
    acme, jobs = tenants.by_name["acme"], tenants.by_name["jobs"]
    assert (acme.weight, acme.tokens_per_second, acme.token_burst) == (2.0, 100.0, 100.0)
    assert (jobs.requests_per_second, jobs.request_burst) == (0.5, 1.0)
    assert acme.cache_salt != jobs.cache_salt
    assert tenants.find_by_key(KEY) is acme


def test_no_reserve_without_a_premium_tenant() -> None:
    assert parse_tenants({"tenants": [tenant()]}).reserved_share == 0.0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "tenants"),
        ({"tenants": []}, "length >= 1"),
        ({"tenants": [tenant(), tenant("other")]}, "a key is listed twice"),
        ({"tenants": [tenant(), tenant(key=b"x")]}, "tenant 'acme' is listed twice"),
        ({"tenants": [tenant("Acme Inc")]}, "is not a valid name"),
        ({"tenants": [tenant(tenant_class="gold")]}, "no class 'gold'"),
        ({"tenants": [tenant()], "max_wait": {"gold": 1.0}}, "no class 'gold'"),
        ({"tenants": [tenant(tenant_class="internal")], "classes": ["internal"]}, "choose another"),
        ({"tenants": [{"name": "a", "keys": ["secret"]}]}, "not a SHA-256"),
        ({"tenants": [tenant(weight=0)]}, "weight"),
        ({"tenants": [tenant(wieght=1)]}, "wieght"),
        ({"tenants": [tenant()], "reserve": 1.5}, "reserve"),
        ({"tenants": [tenant()], "headroom": 1}, "headroom"),
    ],
)
def test_errors_name_the_wrong_value(data: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_tenants(data)


def test_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tenants(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("tenants = [")
    with pytest.raises(ConfigError, match="--tenants"):
        load_tenants(str(tmp_path / "bad"))


def test_only_keys_of_the_file_are_accepted() -> None:
    clients = ClientAuthenticator(tenants=parse_tenants({"tenants": [tenant()]}))
    assert clients.identify_tenant(b"Bearer " + KEY).name == "acme"
    assert (
        clients.make_principal(clients.identify_tenant(b"bearer " + KEY), 0).tenant_class
        == "standard"
    )
    for sent in (None, b"", b"Bearer", b"Bearer other", b"Basic " + KEY):
        with pytest.raises(Unauthenticated):
            clients.identify_tenant(sent)


def test_tenants_file_allows_a_public_bind_and_excludes_api_key() -> None:
    open_to_all: dict[str, Any] = {"host": "0.0.0.0", "cluster_token": "t", "admin_token": "a"}
    check_coordinator_binds(Config(tenants="file", **open_to_all))
    with pytest.raises(ConfigError, match="both set"):
        check_coordinator_binds(Config(tenants="file", api_key="k"))
