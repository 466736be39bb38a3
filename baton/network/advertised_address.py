"""Where peers dial this node, if nobody has said: the address of the interface by which it reaches
the coordinator.

A wildcard is nobody's address, and a container does not know its own before it runs.
"""

import asyncio
import contextlib
import socket

import msgspec

from baton.config.settings import Config
from baton.errors import ConfigError
from baton.network.bind_policy import get_endpoint_host
from baton.process import log

AUTO = "auto"
_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two tries


async def with_advertised_address(config: Config, stop: asyncio.Event) -> Config:
    """`config` with an address in `advertise` if that was `auto`, or empty beside a wildcard in
    `listen`.

    Waits as long as the coordinator's name does not resolve, as a node waits for a coordinator that
    is not there yet; returns `config` as it is once `stop` is set. Raises ConfigError for a
    coordinator that is no HOST:PORT.
    """
    if config.advertise != AUTO and (
        config.advertise or get_endpoint_host(config.listen) not in _WILDCARDS
    ):
        return config
    host, port = _parse_coordinator(config.coordinator)
    pause = _FIRST_PAUSE
    while not stop.is_set():
        try:
            address = await find_own_address(host, port)
        except OSError as error:
            log.get_logger("node").warning(
                "coordinator unknown", address=config.coordinator, reason=error.strerror
            )
        else:
            log.get_logger("node").info("advertising", address=address)
            return msgspec.structs.replace(config, advertise=address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stop.wait()
        pause = min(pause * 2, _LONGEST_PAUSE)
    return config


async def find_own_address(host: str, port: int) -> str:
    """The address that packets from here to `host` carry, in brackets if it is IPv6. Nothing is
    sent: connecting a datagram socket only asks the kernel's routes. Raises OSError when the name
    is unknown or no route leads there."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)
        own = str(asking.getsockname()[0])
    return f"[{own}]" if ":" in own else own


def _parse_coordinator(coordinator: str) -> tuple[str, int]:
    host, port = get_endpoint_host(coordinator), coordinator.rpartition(":")[2]
    if not host or not port.isdecimal():
        raise ConfigError(
            f"coordinator is {coordinator!r}: it must be HOST:PORT", param="coordinator"
        )
    return host, int(port)
