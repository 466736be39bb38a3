"""What one check of `baton doctor` found."""

from dataclasses import dataclass
from typing import Literal

FindingLevel = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`bad`: Baton will not work, or not as configured. `warning`: it will, worse than it could.
    Both have a fix."""

    name: str
    level: FindingLevel
    detail: str
    fix: str = ""


def ok_finding(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warning_finding(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "warning", detail, fix)


def bad_finding(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "bad", detail, fix)
