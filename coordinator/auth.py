"""Who may do what. Keys are compared in constant time; they are never logged."""

import hmac
import ipaddress

from baton.config import Config
from baton.errors import ConfigError, Unauthenticated


class BearerKey:
    """A key that callers present as `authorization: Bearer KEY`. An empty key lets everybody in."""

    def __init__(self, key: str, knob: str) -> None:
        self._key = key.encode()
        self._knob = knob

    @property
    def required(self) -> bool:
        return bool(self._key)

    def check(self, authorization: bytes | None) -> None:
        """Raises Unauthenticated."""
        if not self._key:
            return
        if not authorization:
            raise Unauthenticated(f"a key is needed: send 'authorization: Bearer KEY' ({self._knob})")
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise Unauthenticated(f"the key is not valid here ({self._knob})")


class AdminGate:
    """Admin calls need the admin token; without a configured token they must come from this machine."""

    def __init__(self, token: str) -> None:
        self._key = BearerKey(token, "--admin-token")

    def check(self, peer: str | None, authorization: bytes | None) -> None:
        """`peer` is the caller's IP address, None if unknown. Raises Unauthenticated."""
        if self._key.required:
            self._key.check(authorization)
        elif peer is None or not is_loopback(peer):
            raise Unauthenticated("admin calls from another host need --admin-token to be set and sent")


def is_loopback(host: str) -> bool:
    """Of an address or the name localhost; any other name counts as reachable from outside."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_exposure(settings: Config) -> None:
    """Refuse to listen where others can reach without the key that would keep them out. Raises ConfigError."""
    if settings.insecure:
        return
    for host, key in (("host", "api_key"), ("cluster_host", "cluster_token"), ("admin_host", "admin_token")):
        address = getattr(settings, host)
        if not is_loopback(address) and not getattr(settings, key):
            flag, wanted = (f"--{field.replace('_', '-')}" for field in (host, key))
            raise ConfigError(
                f"{flag} {address} can be reached from other hosts and {wanted} is not set: "
                f"set {wanted}, or bind to 127.0.0.1, or say --insecure",
                param=key,
            )
