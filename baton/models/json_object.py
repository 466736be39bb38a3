"""JSON files of a model folder, read with errors that name the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

JsonObject = Mapping[str, Any]


def read_json_object(path: Path) -> JsonObject:
    """Read the JSON object in `path`. Raises ConfigError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file: give --model the path of a Hugging Face folder"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a JSON {type(raw).__name__}, not an object")
    return raw


def get_int_field(raw: JsonObject, key: str, least: int, file: str = "config.json") -> int | None:
    """Return the value of `key`, or None if it is absent or null.

    Raises ConfigError unless it is an integer of at least `least`.
    """
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} {value!r} in {file}: must be an integer of at least {least}")
    return value
