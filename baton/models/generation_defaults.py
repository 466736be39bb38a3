"""Reads generation_config.json: end-of-sequence tokens and default sampling parameters.

Nodes use the end-of-sequence tokens, the coordinator the defaults.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.limits import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from baton.models.json_object import JsonObject, get_int_field, read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of a model; None for fields that the file does not set."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None  # 0 (greedy) if the file has `do_sample: false`
    top_k: int | None = None  # 0 is off
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read the file of a model folder. Without the file there are no defaults.

    Raises ConfigError.
    """
    path = folder / GENERATION_CONFIG_FILE
    return (
        parse_generation_defaults(read_json_object(path)) if path.exists() else GenerationDefaults()
    )


def parse_generation_defaults(raw: JsonObject) -> GenerationDefaults:
    """Convert the JSON object; fields that GenerationDefaults lacks are ignored.

    Raises ConfigError that names the field, its value and the allowed values.
    """
    sampled = raw.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise _invalid_field_error("do_sample", sampled, "true or false")
    temperature = _get_float_field(raw, "temperature", 0.0, MAX_TEMPERATURE)
    return GenerationDefaults(
        eos_token_ids=parse_eos_token_ids(raw, GENERATION_CONFIG_FILE),
        temperature=0.0 if sampled is False else temperature,
        top_k=get_int_field(raw, "top_k", 0, GENERATION_CONFIG_FILE),
        top_p=_get_float_field(raw, "top_p", 0.0, 1.0, open_below=True),
        min_p=_get_float_field(raw, "min_p", 0.0, 1.0),
        repetition_penalty=_get_float_field(
            raw, "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        max_new_tokens=get_int_field(raw, "max_new_tokens", 1, GENERATION_CONFIG_FILE),
    )


def parse_eos_token_ids(raw: JsonObject, file: str) -> tuple[int, ...]:
    """Read `eos_token_id` of config.json or generation_config.json: one id, a list or null.

    Raises ConfigError.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise _invalid_field_error("eos_token_id", value, "a token id or a list of them", file)
    return tuple(dict.fromkeys(ids))


def _get_float_field(
    raw: JsonObject, field: str, low: float, high: float, *, open_below: bool = False
) -> float | None:
    value = raw.get(field)
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or (open_below and number == low):
        raise _invalid_field_error(
            field,
            value,
            f"a number {'above' if open_below else 'of at least'} {low:g} and at most {high:g}",
        )
    return float(number)


def _invalid_field_error(
    field: str, value: object, requirement: str, file: str = GENERATION_CONFIG_FILE
) -> ConfigError:
    return ConfigError(f"{field} {value!r} in {file}: must be {requirement}")
