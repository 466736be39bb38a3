"""Amounts of memory as settings write them."""

import math

from baton.errors import ConfigError
from baton.shared_memory.available_memory import AvailableMemory

AUTO = "auto"
MAX_AUTO_POOL_TOKENS = (
    1 << 17
)  # what a pool left to auto holds at most: a small model needs no gigabytes
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_AUTO_SHARE = 0.1  # of the memory that is left for segments
_MAX_AUTO_BYTES = {"kv_memory": 1 << 30, "pool_memory": 4 << 30}  # what auto takes at most


def resolve_memory_size(text: str, room: AvailableMemory, field: str = "kv_memory") -> int:
    """`text` where `room` is what there is: a share is one of what may be used, auto a tenth of
    what is left, and never more than may be used."""
    if text == AUTO:
        return min(parse_memory_size(text, room.free_bytes, field), room.usable_bytes)
    return parse_memory_size(text, room.usable_bytes, field)


def parse_memory_size(text: str, free: int, field: str = "kv_memory") -> int:
    """`4GiB`, `512MiB`, a plain number of bytes, a share of `free` bytes such as 0.5, or auto: a
    tenth of them, and no more than what is usual for `field`."""
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
            f"{field} is {text!r}: say 4GiB, 512MiB, a share such as 0.5{auto}", param=field
        )
    return int(number * free) if number < 1.0 and not unit else int(number)
