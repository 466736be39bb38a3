"""The address that peers dial, which need not be the one that a process listens on.

When the settings name none, it is that of the interface that reaches the coordinator. Peers cannot
dial a wildcard, and the address of a container is not known before it runs.
"""

import asyncio
import contextlib
import dataclasses
import re
import socket
from typing import TypeVar

from baton.config.common import MemberConfig
from baton.network.bind_policy import get_endpoint_host, parse_endpoint
from baton.process import log

_C = TypeVar("_C", bound=MemberConfig)

AUTO = "auto"
_HAS_PORT = re.compile(r"(\[.+\]|[^:]+):\d+")
_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts


async def with_advertised_address(config: _C, stop: asyncio.Event) -> _C:
    """Return `config` with an address in `advertise`.

    Replaces `auto`, and an empty value if `listen` has a wildcard. Waits until the coordinator's
    name resolves, as a node waits for a coordinator that has not started. Returns `config`
    unchanged once `stop` is set. Raises ConfigError unless the coordinator is HOST:PORT.
    """
    if config.advertise != AUTO and (
        config.advertise or get_endpoint_host(config.listen) not in _WILDCARDS
    ):
        return config
    host, port = parse_endpoint(config.coordinator, "--coordinator", "coordinator")
    pause = _FIRST_PAUSE
    while not stop.is_set():
        try:
            address = await find_own_address(host, port)
        except OSError as error:
            log.get_logger("node").warning(
                "cannot resolve the coordinator's address",
                address=config.coordinator,
                reason=error.strerror,
            )
        else:
            log.get_logger("node").info("transfer address advertised", address=address)
            return dataclasses.replace(config, advertise=address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stop.wait()
        pause = min(pause * 2, _LONGEST_PAUSE)
    return config


def has_port(address: str) -> bool:
    """Whether an address is HOST:PORT or [IPV6]:PORT."""
    return _HAS_PORT.fullmatch(address) is not None


def address_to_dial(advertise: str, port: str) -> str:
    """Add the bound port to `advertise`, unless it has one: behind a port mapping they differ."""
    return advertise if has_port(advertise) else f"{advertise}:{port}"


async def find_own_address(host: str, port: int) -> str:
    """Return the source address of packets to `host`, in brackets if it is IPv6.

    Nothing is sent: connecting a datagram socket only looks up the kernel's routes. Raises OSError
    when the name does not resolve or there is no route.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        source_address = str(probe.getsockname()[0])
    return f"[{source_address}]" if ":" in source_address else source_address
