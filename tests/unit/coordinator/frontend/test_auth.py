"""Keys, and where one may listen without them."""

from contextlib import nullcontext
from typing import Any

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError, Unauthenticated
from baton.network.bind_policy import check_coordinator_binds, is_loopback
from coordinator.frontend.auth import AdminAuthenticator, BearerKey
from coordinator.frontend.grpc.errors import parse_peer_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.evil.com", "::ffff:10.0.0.1"],
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5", "127.0.0.1"),
        ("ipv6:[::1]:5", "::1"),
        ("ipv6:%5B::1%5D:5", "::1"),
        ("ipv6:[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::1"),
        ("nonsense", None),
        ("unix:/tmp/x", None),
        ("", None),
    ],
)
def test_grpc_names_of_peers(peer: str, host: str | None) -> None:
    assert parse_peer_address(peer) == host


@pytest.mark.parametrize(
    "sent", [None, b"", b"Bearer", b"Bearer other", b"Basic key", b"key", b"Bearer key2"]
)
def test_wrong_keys(sent: bytes | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        BearerKey("key", "--api-key").check_authorization(sent)
    assert "--api-key" in caught.value.message


def test_right_keys() -> None:
    BearerKey("key", "--api-key").check_authorization(b"Bearer key")
    BearerKey("schlüssel", "--api-key").check_authorization("bearer schlüssel".encode())
    BearerKey("", "--api-key").check_authorization(None)


def test_admin_token_or_loopback_is_required() -> None:
    AdminAuthenticator("").check_caller("127.0.0.1", None)
    for peer in ("10.0.0.1", None):
        with pytest.raises(Unauthenticated, match="--admin-token"):
            AdminAuthenticator("").check_caller(peer, b"Bearer x")
    AdminAuthenticator("token").check_caller("10.0.0.1", b"Bearer token")
    with pytest.raises(Unauthenticated):
        AdminAuthenticator("token").check_caller("127.0.0.1", None)


@pytest.mark.parametrize(
    ("host", "origin", "open_"),
    [
        ("127.0.0.1:9000", None, True),
        ("localhost:9000", None, True),
        ("[::1]:9000", None, True),
        ("127.0.0.1:9000", "http://127.0.0.1:9000", True),
        ("127.0.0.1:9000", "http://evil.example", False),
        ("127.0.0.1:9000", "null", False),
        ("127.0.0.1:9000", "http://127.0.0.1:8080", False),
        ("evil.example:9000", None, False),
        ("evil.example:9000", "http://evil.example:9000", False),
        ("[::1", None, False),
        ("", None, False),
    ],
)
def test_cross_origin_pages_need_the_admin_token(
    host: str, origin: str | None, open_: bool
) -> None:
    AdminAuthenticator("token").check_same_origin(host, origin)
    with nullcontext() if open_ else pytest.raises(Unauthenticated, match="--admin-token"):
        AdminAuthenticator("").check_same_origin(host, origin)


@pytest.mark.parametrize(
    ("name", "direct"),
    [
        ("X-Forwarded-For", False),
        ("x-real-ip", False),
        ("forwarded", False),
        ("via", False),
        ("x-request-id", True),
        ("user-agent", True),
    ],
)
def test_proxied_calls_need_the_admin_token(name: str, direct: bool) -> None:
    AdminAuthenticator("token").check_not_proxied(["host", name])
    with nullcontext() if direct else pytest.raises(Unauthenticated, match="--admin-token"):
        AdminAuthenticator("").check_not_proxied(["host", name])


@pytest.mark.parametrize(
    ("host", "key"),
    [("host", "api_key"), ("cluster_host", "cluster_token"), ("admin_host", "admin_token")],
)
def test_exposed_ports_need_their_key(host: str, key: str) -> None:
    check_coordinator_binds(Config())
    exposed: dict[str, Any] = {host: "0.0.0.0"}
    with pytest.raises(ConfigError, match="or use --insecure") as caught:
        check_coordinator_binds(Config(**exposed))
    assert caught.value.param == key
    check_coordinator_binds(Config(**exposed | {key: "secret"}))
    check_coordinator_binds(Config(**exposed, insecure=True))
