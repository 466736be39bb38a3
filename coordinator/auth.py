"""Who may do what. Keys are compared in constant time; they are never logged."""

import hmac

from baton.config import Config
from baton.errors import Unauthenticated
from baton.exposure import is_loopback, require_key


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


def check_exposure(settings: Config) -> None:
    """Every port of the coordinator has its key. Raises ConfigError."""
    for host, key in (("host", "api_key"), ("cluster_host", "cluster_token"), ("admin_host", "admin_token")):
        flag = f"--{host.replace('_', '-')}"
        require_key(flag, getattr(settings, host), key, getattr(settings, key), insecure=settings.insecure)
