"""Who may do what. Keys are compared in constant time; they are never logged."""

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from baton.errors import ConfigError, Unauthenticated
from baton.network.bind_policy import is_loopback, is_numeric_or_local
from baton.types import Principal
from coordinator.core.admission.tenants import DEFAULT_TENANT, Tenant, TenantTable

_NO_TENANTS = TenantTable()

# What proxies add to a request that they pass on: RFC 7239, RFC 9110, and what was usual before
# them.
_PROXY_HEADERS = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)


class BearerKey:
    """A key that callers present as `authorization: Bearer KEY`. An empty key lets everybody in."""

    def __init__(self, key: str, knob: str) -> None:
        self._key = key.encode()
        self._flag = knob

    @property
    def is_required(self) -> bool:
        return bool(self._key)

    def check_authorization(self, authorization: bytes | None) -> None:
        """Raises Unauthenticated."""
        if not self._key:
            return
        if not hmac.compare_digest(_parse_bearer_key(authorization, self._flag), self._key):
            raise Unauthenticated(f"the key is not valid here ({self._flag})")


def _parse_bearer_key(authorization: bytes | None, knob: str) -> bytes:
    if not authorization:
        raise Unauthenticated(f"a key is needed: send 'authorization: Bearer KEY' ({knob})")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthenticated(f"the key is not valid here ({knob})")
    return key.strip()


class ClientAuthenticator:
    """Who calls a front door. With a file of tenants every caller needs one of its keys; else all
    are one tenant, and need --api-key if that is set. `tenants` may be replaced while calls come
    in."""

    def __init__(self, api_key: str = "", tenants: TenantTable | None = None) -> None:
        self._key = BearerKey(api_key, "--api-key")
        self.tenants = tenants

    @property
    def is_key_required(self) -> bool:
        """Whether callers need a key."""
        return self.tenants is not None or self._key.is_required

    def identify_tenant(self, authorization: bytes | None) -> Tenant:
        """Raises Unauthenticated."""
        if self.tenants is None:
            self._key.check_authorization(authorization)
            return DEFAULT_TENANT
        tenant = self.tenants.find_by_key(_parse_bearer_key(authorization, "--tenants"))
        if tenant is None:
            raise Unauthenticated("the key is no tenant's (--tenants)")
        return tenant

    def make_principal(self, tenant: Tenant, priority: int) -> Principal:
        """See `TenantTable.make_principal`."""
        return (self.tenants or _NO_TENANTS).make_principal(tenant, priority)


def parse_allowed_origins(setting: str) -> frozenset[str]:
    """Those of --allowed-origins. Raises ConfigError."""
    origins = frozenset(filter(None, map(str.strip, setting.split(","))))
    for origin in origins:
        try:
            parts = urlsplit(origin)
        except ValueError:
            parts = urlsplit("")
        if not (parts.scheme in ("http", "https") and parts.netloc) or parts.path or parts.query:
            raise ConfigError(
                f"allowed_origins has {origin!r}: an origin is http://HOST or https://HOST, with "
                ":PORT if any"
            )
    return origins


def is_origin_allowed(origin: str | None, host: str, origins: frozenset[str]) -> bool:
    """Whether a call that needs no key may come from a web page of this origin: one of this
    machine, one that this very port serves under a name that nobody can give it from outside, or
    one that is allowed. `origin` and `host` are headers; calls that are no web page's have no
    origin."""
    if origin is None or origin in origins:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or (parts.netloc == host and is_numeric_or_local(name))


class AdminAuthenticator:
    """Admin calls need the admin token; without a configured token they must come from this
    machine."""

    def __init__(self, token: str) -> None:
        self._key = BearerKey(token, "--admin-token")

    def check_caller(self, peer: str | None, authorization: bytes | None) -> None:
        """`peer` is the caller's IP address, None if unknown. Raises Unauthenticated."""
        if self._key.is_required:
            self._key.check_authorization(authorization)
        elif peer is None or not is_loopback(peer):
            raise Unauthenticated(
                "admin calls from another host need --admin-token to be set and sent"
            )

    def check_not_proxied(self, header_names: Iterable[str]) -> None:
        """Without a token, a call that a proxy passed on is refused: the address that is judged is
        the proxy's, and says nothing of the caller. Raises Unauthenticated."""
        if self._key.is_required:
            return
        passed_on = _PROXY_HEADERS.intersection(name.lower() for name in header_names)
        if passed_on:
            raise Unauthenticated(
                f"admin calls through a proxy (header {min(passed_on)}) need --admin-token to be "
                "set and sent"
            )

    def check_same_origin(self, host: str, origin: str | None) -> None:
        """Of the headers of an HTTP call: without a token, no web page of elsewhere may use this
        machine's browser to call, not under a name that it made to point here either. Raises
        Unauthenticated."""
        if self._key.is_required:
            return
        try:
            named = not is_numeric_or_local(urlsplit(f"//{host}").hostname or "")
            foreign = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            named = foreign = True
        if named or foreign:
            raise Unauthenticated(
                "admin calls by a web page, or to this machine by another name than its address "
                "or localhost, need "
                "--admin-token to be set and sent"
            )
