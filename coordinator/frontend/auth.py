"""Authentication of clients and operators. Keys are compared in constant time, never logged."""

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from baton.errors import ConfigError, Unauthenticated
from baton.network.bind_policy import is_loopback, is_numeric_or_local
from baton.types import Principal
from coordinator.core.admission.tenants import DEFAULT_TENANT, Tenant, TenantTable

_NO_TENANTS = TenantTable()

# Headers that proxies add to requests that they forward: RFC 7239, RFC 9110 and older custom.
_PROXY_HEADERS = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)


class BearerKey:
    """A key that callers send as `authorization: Bearer KEY`. An empty key admits every caller."""

    def __init__(self, key: str, flag: str) -> None:
        """`flag` is the setting that error messages name."""
        self._key = key.encode()
        self._flag = flag

    @property
    def is_required(self) -> bool:
        return bool(self._key)

    def check_authorization(self, authorization: bytes | None) -> None:
        """Raises Unauthenticated."""
        if not self._key:
            return
        if not hmac.compare_digest(_parse_bearer_key(authorization, self._flag), self._key):
            raise Unauthenticated(f"the key is not valid here ({self._flag})")


def _parse_bearer_key(authorization: bytes | None, flag: str) -> bytes:
    """Raises Unauthenticated."""
    if not authorization:
        raise Unauthenticated(f"a key is needed: send 'authorization: Bearer KEY' ({flag})")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthenticated(f"the key is not valid here ({flag})")
    return key.strip()


class ClientAuthenticator:
    """Finds the tenant of a caller of the front end.

    With a file of tenants, every caller needs one of its keys. Without one, all callers are one
    tenant, and need --api-key if that is set.
    """

    def __init__(self, api_key: str = "", tenants: TenantTable | None = None) -> None:
        self._key = BearerKey(api_key, "--api-key")
        self.tenants = tenants  # may be replaced while calls arrive

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
            raise Unauthenticated("the key belongs to no tenant (--tenants)")
        return tenant

    def make_principal(self, tenant: Tenant, priority: int) -> Principal:
        """See `TenantTable.make_principal`."""
        return (self.tenants or _NO_TENANTS).make_principal(tenant, priority)


def parse_allowed_origins(setting: str) -> frozenset[str]:
    """Parse --allowed-origins. Raises ConfigError."""
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
    """Whether a web page of this origin may call a port that needs no key.

    Allowed are pages of this machine, pages that this port itself serves under a numeric or local
    name (which DNS rebinding cannot give it), and `origins`. `origin` and `host` are the headers;
    a call that no web page makes has no origin.
    """
    if origin is None or origin in origins:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or (parts.netloc == host and is_numeric_or_local(name))


class AdminAuthenticator:
    """Admin calls need the admin token; without a configured token, they must be local."""

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
        """Without a token, refuse a call that a proxy forwarded.

        Its peer address is the proxy's and says nothing about the caller. Raises Unauthenticated.
        """
        if self._key.is_required:
            return
        forwarded = _PROXY_HEADERS.intersection(name.lower() for name in header_names)
        if forwarded:
            raise Unauthenticated(
                f"admin calls through a proxy (header {min(forwarded)}) need --admin-token to be "
                "set and sent"
            )

    def check_same_origin(self, host: str, origin: str | None) -> None:
        """Without a token, refuse calls that a foreign web page makes through a local browser.

        That includes pages whose host name was made to point here (DNS rebinding). `host` and
        `origin` are headers of the HTTP call. Raises Unauthenticated.
        """
        if self._key.is_required:
            return
        try:
            has_foreign_name = not is_numeric_or_local(urlsplit(f"//{host}").hostname or "")
            has_foreign_origin = origin is not None and urlsplit(origin).netloc != host
        except ValueError:
            has_foreign_name = has_foreign_origin = True
        if has_foreign_name or has_foreign_origin:
            raise Unauthenticated(
                "admin calls by a web page, or to this machine by another name than its address "
                "or localhost, need "
                "--admin-token to be set and sent"
            )
