"""Amounts of memory as settings write them."""

import math

from baton.errors import ConfigError

_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DEFAULT_MEMORY = 1 << 30
_DEFAULT_SHARE = 0.1  # of the segment folder's free space


def parse_memory(text: str, free: int) -> int:
    """`4GiB`, `512MiB`, a plain number of bytes, a share of `free` bytes such as 0.5, or auto."""
    if text == "auto":
        return min(_DEFAULT_MEMORY, int(_DEFAULT_SHARE * free))
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        number = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"kv_memory is {text!r}: say 4GiB, 512MiB, a share such as 0.5, or auto")
    return int(number * free) if number < 1.0 and not unit else int(number)
