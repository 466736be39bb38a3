"""Reading docker-compose.yml as Compose does, without an engine: interpolation, merge keys, and
what a service is."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SECRETS = {
    "BATON_API_KEY": "a" * 8,
    "BATON_CLUSTER_TOKEN": "c" * 8,
    "BATON_ADMIN_TOKEN": "o" * 8,
    "GRAFANA_PASSWORD": "g" * 8,
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATORS = (":-", ":?", ":+", "-", "?", "+")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgKMG]?)(?:i?[bB])?")


class MissingVariable(Exception):
    """A `${NAME:?message}` without a value. Compose starts nothing then."""


@dataclass(frozen=True, slots=True)
class Mount:
    kind: str  # bind, volume, tmpfs
    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class ComposeService:
    """One service, resolved. `raw` is its mapping after interpolation."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    healthcheck_command: tuple[str, ...]
    replicas: int
    stop_grace_seconds: float  # seconds
    profiles: frozenset[str]
    depends_on: frozenset[str]
    mounts: tuple[Mount, ...]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComposeFile:
    services: Mapping[str, ComposeService]
    raw: Mapping[str, Any]

    def startup_order(self, *profiles: str) -> list[ComposeService]:
        """What `up` starts, dependencies first; each is stopped before what it depends on."""
        wanted = {
            s.name: s
            for s in self.services.values()
            if not s.profiles or s.profiles & set(profiles)
        }
        order: list[ComposeService] = []
        while wanted:
            ready = [s for s in wanted.values() if not s.depends_on & wanted.keys()]
            assert ready, f"services depend on each other: {sorted(wanted)}"
            order += ready
            wanted = {name: s for name, s in wanted.items() if s not in ready}
        return order


def load_compose_file(path: Path, variables: Mapping[str, str]) -> ComposeFile:
    """Raises MissingVariable."""
    raw = interpolate(yaml.safe_load(path.read_text()), variables)
    services = {
        name: _service(name, service, variables) for name, service in raw["services"].items()
    }
    return ComposeFile(services, raw)


def read_dotenv(path: Path) -> dict[str, str]:
    """The variables of an .env file of plain NAME=VALUE lines; empty values are no values."""
    lines = (
        line.partition("=") for line in path.read_text().splitlines() if not line.startswith("#")
    )
    return {name: value for name, _, value in lines if value}


# interpolation


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Every string in a YAML document, keys left alone."""
    if isinstance(value, str):
        return substitute_variables(value, variables)
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    return value


def substitute_variables(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-default}` and its kin, nested; `$$` is a dollar. Raises
    MissingVariable."""
    parts = []
    while "$" in text:
        before, _, text = text.partition("$")
        parts.append(before)
        if text.startswith("$"):
            found, text = "$", text[1:]
        elif text.startswith("{"):
            inside, text = _braced(text[1:])
            found = _expression(inside, variables)
        else:
            name = _NAME.match(text)
            assert name, f"a lone dollar before {text[:20]!r}"
            found, text = variables.get(name[0], ""), text[name.end() :]
        parts.append(found)
    return "".join(parts) + text


def list_variables(text: str) -> set[str]:
    """The names that a compose file asks for, by interpolation."""
    return set(re.findall(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)", text))


def _braced(text: str) -> tuple[str, str]:
    """What stands before the closing brace, and what after it."""
    depth = 1
    for place, letter in enumerate(text):
        if letter == "{" and text[place - 1 : place] == "$":
            depth += 1
        elif letter == "}":
            depth -= 1
        if depth == 0:
            return text[:place], text[place + 1 :]
    raise AssertionError(f"no closing brace in {text!r}")


def _expression(inside: str, variables: Mapping[str, str]) -> str:
    name = _NAME.match(inside)
    assert name, f"${{{inside}}} names no variable"
    rest = inside[name.end() :]
    operator = next((operator for operator in _OPERATORS if rest.startswith(operator)), "")
    assert operator or not rest, f"${{{inside}}} is not understood"
    value = variables.get(name[0])
    there = bool(value) if operator.startswith(":") else value is not None
    argument = rest[len(operator) :]
    match operator[-1:]:
        case "-":
            return value or "" if there else substitute_variables(argument, variables)
        case "?":
            if not there:
                raise MissingVariable(f"{name[0]} {substitute_variables(argument, variables)}")
        case "+":
            return substitute_variables(argument, variables) if there else ""
    return value or ""


# units


def parse_duration(text: str) -> float:
    """Of a Compose duration such as 1m30s."""
    match = _DURATION.fullmatch(text)
    assert match, f"{text!r} is no duration"
    assert match[0], "an empty text is no duration"
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    return hours * 3600.0 + minutes * 60.0 + rest


def parse_size(text: str) -> int:
    """Bytes of 512m, 2g or 512MiB: in all of them the unit is a power of 1024."""
    match = _SIZE.fullmatch(text)
    assert match, f"{text!r} is no size"
    unit: int = 1024 ** " kmg".index(match[2].lower() or " ")
    return math.floor(float(match[1]) * unit)


# services


def _service(name: str, raw: Mapping[str, Any], variables: Mapping[str, str]) -> ComposeService:
    return ComposeService(
        name=name,
        command=tuple(raw.get("command") or ()),
        environ=_environ(raw.get("environment") or {}, variables),
        healthcheck_command=tuple(raw.get("healthcheck", {}).get("test", ())),
        replicas=int(raw.get("deploy", {}).get("replicas", 1)),
        stop_grace_seconds=parse_duration(raw.get("stop_grace_period", "10s")),
        profiles=frozenset(raw.get("profiles", ())),
        depends_on=frozenset(raw.get("depends_on", ())),
        mounts=tuple(_mounts(raw)),
        raw=raw,
    )


def _environ(raw: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """A name without a value is passed on from where Compose runs, or not at all."""
    given = {name: str(value) for name, value in raw.items() if value is not None}
    passed = {
        name: variables[name] for name, value in raw.items() if value is None and name in variables
    }
    return given | passed


def _mounts(raw: Mapping[str, Any]) -> list[Mount]:
    volumes = [
        Mount(volume["type"], volume["source"], volume["target"], volume.get("read_only", False))
        for volume in raw.get("volumes", ())
    ]
    return volumes + [
        Mount("tmpfs", "", entry.partition(":")[0], False) for entry in raw.get("tmpfs", ())
    ]
