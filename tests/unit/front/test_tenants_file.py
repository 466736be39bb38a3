"""The file of tenants, and who its keys let in."""

from pathlib import Path
from typing import Any

import pytest

from baton.config import Config
from baton.errors import ConfigError, Unauthenticated
from baton.exposure import check_exposure
from coordinator.auth import Clients
from coordinator.core.tenants import hash_key
from coordinator.tenants_file import load, parse

KEY = b"a long and random key"


def tenant(name: str = "acme", key: bytes = KEY, **fields: Any) -> dict[str, Any]:
    return {"name": name, "keys": [f"sha256:{hash_key(key).hex()}"], **fields}


def test_what_a_file_says() -> None:
    data = {
        "max_wait": {"premium": 2},
        "tenants": [
            tenant(**{"class": "premium"}, weight=2, tokens_per_second=100),
            tenant("jobs", b"another long key", **{"class": "batch"}, requests_per_second=0.5),
        ],
    }
    tenants = parse(data)
    assert tenants.classes == ("premium", "standard", "batch")
    assert (tenants.reserve, tenants.headroom) == (0.3, 0.35)
    assert parse({**data, "headroom": 0}).headroom == 0.0
    assert tenants.max_wait == {"premium": 2.0}
    acme, jobs = tenants.tenants["acme"], tenants.tenants["jobs"]
    assert (acme.weight, acme.tokens_per_second, acme.token_burst) == (2.0, 100.0, 100.0)
    assert (jobs.requests_per_second, jobs.request_burst) == (0.5, 1.0)
    assert acme.salt != jobs.salt
    assert tenants.find(KEY) is acme


def test_without_premium_nothing_is_reserved() -> None:
    assert parse({"tenants": [tenant()]}).reserve == 0.0


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({}, "tenants"),
        ({"tenants": []}, "length >= 1"),
        ({"tenants": [tenant(), tenant("other")]}, "a key stands there twice"),
        ({"tenants": [tenant(), tenant(key=b"x")]}, "tenant 'acme' stands there twice"),
        ({"tenants": [tenant("Acme Inc")]}, "is no name"),
        ({"tenants": [tenant(**{"class": "gold"})]}, "no class 'gold'"),
        ({"tenants": [tenant()], "max_wait": {"gold": 1.0}}, "no class 'gold'"),
        ({"tenants": [tenant(**{"class": "internal"})], "classes": ["internal"]}, "choose another"),
        ({"tenants": [{"name": "a", "keys": ["secret"]}]}, "no SHA-256"),
        ({"tenants": [tenant(weight=0)]}, "weight"),
        ({"tenants": [tenant(wieght=1)]}, "wieght"),
        ({"tenants": [tenant()], "reserve": 1.5}, "reserve"),
        ({"tenants": [tenant()], "headroom": 1}, "headroom"),
    ],
)
def test_what_is_wrong_is_named(data: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(data)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("tenants = [")
    with pytest.raises(ConfigError, match="--tenants"):
        load(str(tmp_path / "bad"))


def test_keys_of_the_file_let_in_and_no_others() -> None:
    clients = Clients(tenants=parse({"tenants": [tenant()]}))
    assert clients.identify(b"Bearer " + KEY).name == "acme"
    assert clients.standing(clients.identify(b"bearer " + KEY), 0).tenant_class == "standard"
    for sent in (None, b"", b"Bearer", b"Bearer other", b"Basic " + KEY):
        with pytest.raises(Unauthenticated):
            clients.identify(sent)


def test_tenants_are_keys_enough_to_listen_anywhere_and_exclude_a_common_key() -> None:
    open_to_all = {"host": "0.0.0.0", "cluster_token": "t", "admin_token": "a"}
    check_exposure(Config(tenants="file", **open_to_all))
    with pytest.raises(ConfigError, match="both set"):
        check_exposure(Config(tenants="file", api_key="k"))
