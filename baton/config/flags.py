"""Command-line flags generated from the fields of `Config`.

A flag that is not given is absent from the namespace. `get_typed_settings` returns only what the
user typed, and `baton.config.resolve` merges that with environment, file and defaults.
"""

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

from baton.config.common import ProcessConfig
from baton.config.resolve import (
    get_field_choices,
    get_field_help,
    parse_assignment,
    resolve_config,
    select_settings,
)
from baton.config.settings import FIELD_NAMES, SECRET_FIELDS, Config
from baton.errors import ConfigError

_C = TypeVar("_C", bound=ProcessConfig)
_METAVARS = {int: "N", float: "X"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}


def add_config_flags(parser: argparse.ArgumentParser, fields: Iterable[str] | None = None) -> None:
    """Add a flag for each named field (by default all), `--config FILE` and `--set KEY=VALUE`."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of settings (BATON_CONFIG)", dest="config_file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="config_assignments",
        metavar="KEY=VALUE",
        help="any setting by its name, such as dtype=float32; may be repeated",
    )
    settings = parser.add_argument_group(
        "settings", "each is also BATON_<NAME> and a key of --config FILE"
    )
    for field in FIELD_NAMES if fields is None else fields:
        _add_flag(settings, field)


def get_typed_settings(namespace: argparse.Namespace) -> dict[str, object]:
    """Return the settings that the user typed.

    Raises ConfigError for a malformed `--set`, or one that contradicts a flag.
    """
    typed = {field: value for field, value in vars(namespace).items() if field in _DEFAULTS}
    for assignment in namespace.config_assignments:
        key, value = parse_assignment(assignment)
        if key in typed and typed[key] != value:
            description = "twice" if key in SECRET_FIELDS else f"as {typed[key]!r} and as {value!r}"
            raise ConfigError(f"{key} is given {description}: set it once", param=key)
        typed[key] = value
    return typed


def load_config(
    argv: Sequence[str] | None, config_class: type[_C], *, prog: str, description: str
) -> _C:
    """Resolve the settings of a process: it has a flag for each field of `config_class`, no other.

    Raises ConfigError. Exits with 2 on unknown flags.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add_config_flags(parser, [field.name for field in dataclasses.fields(config_class)])
    namespace = parser.parse_args(argv)
    config = resolve_config(get_typed_settings(namespace), file=namespace.config_file)
    return select_settings(config, config_class)


def _add_flag(group: argparse._ArgumentGroup, field: str) -> None:
    flag = "--" + field.replace("_", "-")
    default = _DEFAULTS[field]
    text = get_field_help(field).replace("%", "%%")
    if default not in ("", False):
        text = f"{text} (default {default})".strip()
    if isinstance(default, bool):
        group.add_argument(
            flag,
            action=argparse.BooleanOptionalAction,
            dest=field,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    group.add_argument(
        flag,
        dest=field,
        default=argparse.SUPPRESS,
        choices=get_field_choices(field) or None,
        metavar=None if get_field_choices(field) else _METAVARS.get(type(default), "TEXT"),
        help=text,
    )
