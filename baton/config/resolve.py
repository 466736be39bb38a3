"""Resolves settings: a flag overrides the environment, which overrides the file and the default."""

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from baton.config.common import ProcessConfig
from baton.config.settings import (
    ENV_PREFIX,
    FIELD_NAMES,
    NON_SETTING_VARIABLES,
    SECRET_FIELDS,
    Config,
)
from baton.errors import ConfigError

_C = TypeVar("_C", bound=ProcessConfig)
_FIELD_TYPES: dict[str, Any] = get_type_hints(Config, include_extras=True)
_HEADER_SECRETS = frozenset({"api_key", "admin_token"})  # that clients send in a header


def get_field_help(field: str) -> str:
    """Return the help text of a field, or "" if it has none."""
    return next(
        (m.description for m in getattr(_FIELD_TYPES[field], "__metadata__", ()) if m.description),
        "",
    )


def get_field_choices(field: str) -> tuple[str, ...]:
    """Return the values that a field accepts, or () if it is not a choice."""
    hint = _FIELD_TYPES[field]
    literal = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return get_args(literal) if get_origin(literal) is Literal else ()


def resolve_config(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str] = os.environ,
    file: str | None = None,
    source: str = "command line",
) -> Config:
    """Merge the given flags, BATON_* variables, the TOML file and the defaults.

    `source` is where the flags come from, for errors.

    Raises ConfigError that names the field, the value and where it came from.
    """
    merged: dict[str, object] = {}
    sources: dict[str, str] = {}
    path = file or environ.get("BATON_CONFIG")
    layers = [(_read_config_file(path), f"file {path}")] if path else []
    layers += [(_read_environment(environ), "environment"), (dict(flags), source)]
    for values, origin in layers:
        for key, value in values.items():
            if key not in FIELD_NAMES:
                raise ConfigError(f"there is no setting {key!r} ({origin})")
            merged[key], sources[key] = value, origin
    for key in merged:
        try:
            merged[key] = msgspec.convert(merged[key], _FIELD_TYPES[key], strict=False)
        except msgspec.ValidationError as error:
            value_text = "(secret)" if key in SECRET_FIELDS else repr(merged[key])
            reason = _describe_invalid_value(key, error)
            raise ConfigError(
                f"{key} is {value_text}: {reason} ({sources[key]})", param=key
            ) from None
    for key in SECRET_FIELDS & merged.keys():
        merged[key] = read_secret(str(merged[key]), key)
    return Config(**merged)  # type: ignore[arg-type]


def select_settings(config: Config, config_class: type[_C]) -> _C:
    """Build the configuration of one process from that of the cluster, field by field name."""
    fields = dataclasses.fields(config_class)
    return config_class(**{field.name: getattr(config, field.name) for field in fields})


def find_unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a notice for each BATON_* variable that is not a setting, with the nearest setting.

    They are not errors, because other programs may set such variables, as Kubernetes does for a
    service that is called baton.
    """
    known = {ENV_PREFIX + field.upper() for field in FIELD_NAMES} | NON_SETTING_VARIABLES
    notices = []
    for name in sorted(key for key in environ if key.startswith(ENV_PREFIX) and key not in known):
        alike = difflib.get_close_matches(
            name, known - {"BATON_LIVENESS_FD", "BATON_SUPERVISOR_PID"}, n=1, cutoff=0.8
        )
        hint = f": did you mean {alike[0]}?" if alike else ""
        notices.append(f"{name} is set, and no setting is called so: it has no effect{hint}")
    return notices


def parse_assignment(text: str) -> tuple[str, str]:
    """Split the `KEY=VALUE` of `--set`. Raises ConfigError."""
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text!r} is not KEY=VALUE")
    return key.strip().replace("-", "_"), value


def read_secret(value: str, field: str) -> str:
    """Return a secret: `value`, or for `@FILE` the contents of the file, stripped.

    Raises ConfigError if the file cannot be read, or is empty: an empty key would admit everybody.
    Also if a header cannot hold the secret, and clients send it in one.
    """
    secret = _read_secret_file(value, field) if value.startswith("@") else value
    if field in _HEADER_SECRETS and not (secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"{field} has characters that no HTTP header can hold: "
            "give one of printable ASCII characters",
            param=field,
        )
    return secret


def _read_secret_file(value: str, field: str) -> str:
    try:
        secret = Path(value[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{field} names {value[1:]!r}, which cannot be read: {reason}", param=field
        ) from None
    if not secret:
        raise ConfigError(
            f"{field} names {value[1:]!r}, which is empty: write the key into it", param=field
        )
    return secret


def _describe_invalid_value(field: str, error: msgspec.ValidationError) -> str:
    if words := get_field_choices(field):
        return f"it must be one of {', '.join(words)}"
    if str(error).startswith("Invalid enum value"):
        return "it must be auto or a number"
    return str(error)


def _read_config_file(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path!r} is not TOML: {error}") from None


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    fields = set(FIELD_NAMES)
    found: dict[str, object] = {}
    for key, value in environ.items():
        field = key.removeprefix("BATON_").lower()
        if key.startswith("BATON_") and field in fields:
            found[field] = value
    return found
