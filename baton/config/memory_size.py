"""Parses amounts of memory in settings."""

import math

from baton.errors import ConfigError
from baton.shared_memory.available_memory import AvailableMemory

AUTO = "auto"
# Tokens that a pool of size auto can hold at most, because a small model needs no gigabytes.
MAX_AUTO_POOL_TOKENS = 1 << 17
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AUTO_SHARE = 0.1  # of the memory that is available for segments
_MAX_AUTO_BYTES = {"kv_memory": 1 << 30, "pool_memory": 4 << 30}  # upper bounds of auto


def resolve_memory_size(text: str, room: AvailableMemory, field: str = "kv_memory") -> int:
    """Convert `text` to bytes where `room` is available.

    A share refers to the usable bytes. auto is a tenth of the free bytes, and at most the usable
    ones.
    """
    if text == AUTO:
        return min(parse_memory_size(text, room.free_bytes, field), room.usable_bytes)
    return parse_memory_size(text, room.usable_bytes, field)


def parse_memory_size(text: str, free: int, field: str = "kv_memory") -> int:
    """Convert `text` to bytes. Raises ConfigError.

    It is `4GiB`, `512MiB`, a number of bytes, a share of `free` bytes such as 0.5, or auto: a tenth
    of them, up to a bound for `field`.
    """
    if text == AUTO and field in _MAX_AUTO_BYTES:
        return min(_MAX_AUTO_BYTES[field], int(_AUTO_SHARE * free))
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        auto = ", or auto" if field in _MAX_AUTO_BYTES else ""
        raise ConfigError(
            f"{field} is {text!r}: use 4GiB, 512MiB, a share such as 0.5{auto}", param=field
        )
    return int(number * free) if number < 1.0 and not unit else int(number)


def is_memory_share(text: str) -> bool:
    """Whether a valid amount is a share of the memory that is there, such as 0.5."""
    return text != AUTO and not text.endswith(tuple(_UNITS)) and float(text) < 1.0
