"""Where writers are told to dial, which need not be where decode listens."""

import re

_HAS_PORT = re.compile(r"(\[.+\]|[^:]+):\d+")


def has_port(address: str) -> bool:
    return _HAS_PORT.fullmatch(address) is not None


def address_to_dial(advertise: str, port: str) -> str:
    """`advertise` with the bound port, unless it names one: behind a port mapping the two
    differ."""
    return advertise if has_port(advertise) else f"{advertise}:{port}"
