"""Service-level objectives as they are written on a command line."""

import re
from dataclasses import dataclass

from baton.errors import InvalidRequest

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_ENTRY = re.compile(
    r"(?P<name>ttft|tpot)=(?P<value>[0-9]{0,9}\.?[0-9]{1,9})(?P<unit>s|ms|us)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; None is no bound."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def __str__(self) -> str:
        bounds = (("ttft", self.ttft_seconds), ("tpot", self.tpot_seconds))
        return ",".join(
            f"{name}={seconds * 1e3:g}ms" for name, seconds in bounds if seconds is not None
        )

    def is_met(self, ttft: float, tpot: float | None) -> bool:
        """Whether one request was good. A request of one token has no TPOT and passes that
        bound."""
        return (self.ttft_seconds is None or ttft <= self.ttft_seconds) and (
            self.tpot_seconds is None or tpot is None or tpot <= self.tpot_seconds
        )


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=50ms`, either or both. Raises InvalidRequest."""
    found: dict[str, float] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or match["name"] in found or not float(match["value"]):
            raise InvalidRequest(
                f"{text[:64]!r} is not ttft=TIME,tpot=TIME with times such as 500ms or 2s",
                param="slo",
            )
        found[match["name"]] = float(match["value"]) * _UNITS[match["unit"]]
    return Slo(ttft_seconds=found.get("ttft"), tpot_seconds=found.get("tpot"))
