"""The result of one check of `baton doctor`."""

from dataclasses import dataclass
from typing import Literal

FindingLevel = Literal["ok", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a finding that is not ok has a fix."""

    name: str
    # bad: Baton will not work, or not as configured; warning: it works, but worse than it could
    level: FindingLevel
    detail: str
    fix: str = ""


def ok_finding(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warning_finding(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "warning", detail, fix)


def bad_finding(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "bad", detail, fix)
