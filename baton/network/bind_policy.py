"""Rules for listening without a key: only on loopback addresses."""

import ipaddress
import re
from functools import lru_cache

from baton.config.coordinator_config import CoordinatorConfig
from baton.errors import ConfigError

_MAX_PORT = 65535
_MAX_CACHED_HOSTS = 256  # every request asks about its host and its client's address


@lru_cache(maxsize=_MAX_CACHED_HOSTS)
def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or the name localhost. Any other name is not."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@lru_cache(maxsize=_MAX_CACHED_HOSTS)
def is_numeric_or_local(host: str) -> bool:
    """Whether `host` is an address or the name localhost, so that no name server is asked."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def require_key_unless_loopback(
    flag: str, host: str, key_field: str, key: str, *, insecure: bool
) -> None:
    """Raise ConfigError if other hosts can reach `host`, the value of `flag`, without a key."""
    if key or insecure or is_loopback(host):
        return
    key_flag = "--" + key_field.replace("_", "-")
    raise ConfigError(
        f"{flag} {host} can be reached from other hosts and {key_flag} is not set: "
        f"set {key_flag}, or bind to 127.0.0.1, or use --insecure",
        param=key_field,
    )


def get_endpoint_host(endpoint: str) -> str:
    """Return the HOST of HOST:PORT, without the brackets of an IPv6 address."""
    return endpoint.rpartition(":")[0].strip("[]")


def parse_endpoint(endpoint: str, flag: str, param: str = "") -> tuple[str, int]:
    """Return host and port of HOST:PORT, the value of `flag`. Raises ConfigError."""
    host, port = get_endpoint_host(endpoint), endpoint.rpartition(":")[2]
    if not host or re.fullmatch("[0-9]{1,5}", port) is None or not 1 <= int(port) <= _MAX_PORT:
        raise ConfigError(
            f"{flag} is {endpoint!r}: it must be HOST:PORT, with a port from 1 to {_MAX_PORT}",
            param=param or None,
        )
    return host, int(port)


def check_coordinator_binds(settings: CoordinatorConfig) -> None:
    """Check that every port of the coordinator has its key. Raises ConfigError."""
    if settings.tenants and settings.api_key:
        raise ConfigError(
            "--api-key and --tenants are both set: with tenants, keys stand in their file",
            param="api_key",
        )
    for host, key in (
        ("host", "api_key"),
        ("cluster_host", "cluster_token"),
        ("admin_host", "admin_token"),
    ):
        flag = f"--{host.replace('_', '-')}"
        value = getattr(settings, key) or (settings.tenants if key == "api_key" else "")
        require_key_unless_loopback(
            flag, getattr(settings, host), key, value, insecure=settings.insecure
        )
