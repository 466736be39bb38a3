"""Reads the TOML file of tenants (docs/tenants.md), which has hashes of keys, never keys."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from coordinator.core.admission.tenants import Tenant, TenantTable, derive_cache_salt
from coordinator.core.common.counters import INTERNAL_CLASS

MAX_CLASSES, MAX_TENANTS, MAX_KEYS = 8, 1024, 4096
DEFAULT_CLASSES = ("premium", "standard", "batch")
DEFAULT_RESERVE = 0.3  # share of a node's blocks that only the first class may take
DEFAULT_HEADROOM = 0.35  # share of a node for tenants within their fair shares
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"(sha256:)?(?P<hex>[0-9a-f]{64})")

PositiveRate = Annotated[float, Meta(gt=0, le=1e12)]


class _TenantEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"tenant_class": "class"}
):
    name: str
    keys: list[str]
    tenant_class: str = "standard"
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    requests_per_second: PositiveRate | None = None
    request_burst: PositiveRate | None = None
    tokens_per_second: PositiveRate | None = None
    token_burst: PositiveRate | None = None


class _TenantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: Annotated[list[_TenantEntry], Meta(min_length=1, max_length=MAX_TENANTS)]
    classes: Annotated[list[str], Meta(min_length=1, max_length=MAX_CLASSES)] = msgspec.field(
        default_factory=lambda: list(DEFAULT_CLASSES)
    )
    reserve: Annotated[float, Meta(ge=0, le=0.9)] = DEFAULT_RESERVE
    headroom: Annotated[float, Meta(ge=0, le=0.9)] = DEFAULT_HEADROOM
    max_wait: dict[str, PositiveRate] = {}


def load_tenants(path: str) -> TenantTable:
    """Raises ConfigError, which says what is wrong but never quotes the hash of a key."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--tenants {path!r} cannot be read: {reason}", param="tenants") from None
    try:
        return parse_tenants(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"--tenants {path!r}: {error}", param="tenants") from None


def parse_tenants(data: dict[str, Any]) -> TenantTable:
    """Raises msgspec.ValidationError or ValueError."""
    read = msgspec.convert(data, _TenantsFile)
    classes = tuple(read.classes)
    for name in (*classes, *(entry.name for entry in read.tenants)):
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name[:64]!r} is not a valid name: "
                "lower-case letters, digits, '_', '.', '-', at most 64"
            )
    _require_distinct("class", classes)
    _require_distinct("tenant", [entry.name for entry in read.tenants])
    for name in (*read.max_wait, *(entry.tenant_class for entry in read.tenants)):
        if name not in classes:
            raise ValueError(f"there is no class {name[:64]!r}: classes are {', '.join(classes)}")
    if INTERNAL_CLASS in classes:
        raise ValueError(
            f"class {INTERNAL_CLASS!r} is the name of the cluster's own requests: choose another"
        )
    keys = [
        (_parse_key_digest(key, entry.name), entry.name)
        for entry in read.tenants
        for key in entry.keys
    ]
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are {len(keys)} keys: at most {MAX_KEYS}")
    if len({digest for digest, _ in keys}) < len(keys):
        raise ValueError("a key is listed twice: each belongs to one tenant")
    first_is_used = any(entry.tenant_class == classes[0] for entry in read.tenants)
    return TenantTable(
        classes=classes,
        by_name={entry.name: _build_tenant(entry) for entry in read.tenants},
        key_digests=tuple(keys),
        reserved_share=read.reserve if first_is_used and len(classes) > 1 else 0.0,
        headroom_share=read.headroom,
        max_wait_seconds=dict(read.max_wait),
    )


def _build_tenant(entry: _TenantEntry) -> Tenant:
    requests, tokens = entry.requests_per_second, entry.tokens_per_second
    return Tenant(
        name=entry.name,
        tenant_class=entry.tenant_class,
        weight=entry.weight,
        requests_per_second=requests,
        request_burst=entry.request_burst or max(1.0, requests or 1.0),
        tokens_per_second=tokens,
        token_burst=entry.token_burst or max(1.0, tokens or 1.0),
        cache_salt=derive_cache_salt(entry.name),
    )


def _parse_key_digest(text: str, tenant: str) -> bytes:
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise ValueError(
            f"a key of tenant {tenant} is not a SHA-256 in hex: `baton tenants hash-key` makes one"
        )
    return bytes.fromhex(match["hex"])


def _require_distinct(kind: str, names: "list[str] | tuple[str, ...]") -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{kind} {name!r} is listed twice")
