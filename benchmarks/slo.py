"""Service-level objectives as they are written on a command line. Pure."""

import re
from dataclasses import dataclass

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_ENTRY = re.compile(r"(?P<name>ttft|tpot)=(?P<value>[0-9.]+)(?P<unit>s|ms|us)$")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, ttft: float, tpot: float | None) -> bool:
        """Whether one request was good. A request of one token has no TPOT and passes that bound."""
        if self.ttft is not None and ttft > self.ttft:
            return False
        return self.tpot is None or tpot is None or tpot <= self.tpot


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=50ms`, either or both. Raises ValueError."""
    found: dict[str, float] = {}
    for entry in text.split(","):
        match = _ENTRY.match(entry.strip())
        if match is None or match["name"] in found:
            raise ValueError(f"{text!r} is not ttft=TIME,tpot=TIME with times such as 500ms or 2s")
        found[match["name"]] = float(match["value"]) * _UNITS[match["unit"]]
    return Slo(**found)
