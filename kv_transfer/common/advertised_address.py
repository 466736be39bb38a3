"""The address that writers dial, which need not be the one that decode listens on."""

import re

_HAS_PORT = re.compile(r"(\[.+\]|[^:]+):\d+")


def has_port(address: str) -> bool:
    """Whether an address is HOST:PORT or [IPV6]:PORT."""
    return _HAS_PORT.fullmatch(address) is not None


def address_to_dial(advertise: str, port: str) -> str:
    """`advertise` with the bound port, unless it has one: behind a port mapping they differ."""
    return advertise if has_port(advertise) else f"{advertise}:{port}"
