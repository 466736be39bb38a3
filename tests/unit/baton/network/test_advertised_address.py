"""`--advertise auto`: where peers dial a node that does not know its own address before it runs."""

import asyncio
import socket
from typing import Any

import pytest

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network import advertised_address as advertise
from baton.network.advertised_address import find_own_address, with_advertised_address


async def resolved(**settings: Any) -> str:
    config = Config(**{"coordinator": "127.0.0.1:50052", **settings})
    return (await with_advertised_address(config, asyncio.Event())).advertise


@pytest.mark.parametrize(
    ("listen", "given", "wanted"),
    [
        ("127.0.0.1:0", "", ""),
        ("10.1.2.3:7000", "", ""),
        ("0.0.0.0:0", "node.example", "node.example"),
        ("0.0.0.0:0", "node.example:7000", "node.example:7000"),
        ("127.0.0.1:0", "auto", "127.0.0.1"),
        ("0.0.0.0:7000", "auto", "127.0.0.1"),
        ("0.0.0.0:7000", "", "127.0.0.1"),
        ("[::]:7000", "", "127.0.0.1"),
    ],
)
async def test_what_is_asked_for_and_what_is_found(listen: str, given: str, wanted: str) -> None:
    assert await resolved(listen=listen, advertise=given) == wanted


async def test_it_is_the_interface_that_leads_to_the_coordinator() -> None:
    """Packets to a host come from the address that it would answer to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        port = elsewhere.getsockname()[1]
        assert await find_own_address("localhost", port) in ("127.0.0.1", "[::1]")
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing was sent
            elsewhere.recv(1)


async def test_an_address_of_ipv6_stands_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking:
        def __init__(self, *kind: object) -> None:
            pass

        def __enter__(self) -> "Asking":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def connect(self, address: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int, int, int]:
            return ("fd00::2", 4711, 0, 0)

    monkeypatch.setattr(socket, "socket", Asking)
    assert await find_own_address("::1", 50052) == "[fd00::2]"


async def test_it_waits_for_a_name_that_does_not_resolve_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[str] = []

    async def later(host: str, port: int) -> str:
        tries.append(host)
        if len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return "10.0.0.7"

    monkeypatch.setattr(advertise, "find_own_address", later)
    assert await resolved(advertise="auto", coordinator="coordinator:50052") == "10.0.0.7"
    assert tries == ["coordinator"] * 3


async def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def never(host: str, port: int) -> str:
        stop.set()
        raise OSError("unreachable")

    monkeypatch.setattr(advertise, "find_own_address", never)
    config = Config(advertise="auto", coordinator="coordinator:50052")
    async with asyncio.timeout(30):
        assert await with_advertised_address(config, stop) is config


@pytest.mark.parametrize(
    "coordinator", ["coordinator", ":50052", "coordinator:", "coordinator:http"]
)
async def test_a_coordinator_that_is_no_endpoint(coordinator: str) -> None:
    with pytest.raises(ConfigError, match="it must be HOST:PORT"):
        await resolved(advertise="auto", coordinator=coordinator)
