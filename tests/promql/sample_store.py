"""Samples by series and time, from scrapes of /metrics or from the notation of promtool's rule
tests."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

LOOKBACK_SECONDS = 300.0  # seconds for which a sample counts as the present one, as in Prometheus

Labels = tuple[tuple[str, str], ...]
Point = tuple[float, float]  # time in seconds, value

_STEP = re.compile(
    r"(?P<first>-?[\d.]+)(?:(?P<sign>[+-])(?P<each>[\d.]+))?x(?P<times>\d+)|(?P<value>-?[\d.]+)"
)


def sorted_labels(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


@dataclass
class SampleStore:
    series: dict[str, dict[Labels, list[Point]]] = field(
        default_factory=dict
    )  # by the metric's name

    def add_point(self, name: str, labels: Mapping[str, str], at: float, value: float) -> None:
        self.series.setdefault(name, {}).setdefault(sorted_labels(labels), []).append((at, value))

    def add_scrape(self, text: str, at: float, *, job: str = "baton") -> None:
        """What /metrics said at that time, and that it answered."""
        self.add_point("up", {"job": job}, at, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.add_point(sample.name, {**sample.labels, "job": job}, at, sample.value)

    def add_series(self, selector: str, values: str, interval: float) -> None:
        """A series of promtool's notation: `0+5x10` is eleven values, each 5 more; `_` is none,
        `_x3` three of them."""
        name, labels = _parse_selector(selector)
        for number, value in enumerate(_values(values)):
            if value is not None:
                self.add_point(name, labels, number * interval, value)

    def iter_points(self, name: str) -> Iterator[tuple[Labels, list[Point]]]:
        yield from self.series.get(name, {}).items()


def _parse_selector(selector: str) -> tuple[str, dict[str, str]]:
    name, _, rest = selector.partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', rest))


def _values(text: str) -> Iterator[float | None]:
    for word in text.split():
        if word.startswith("_"):
            yield from [None] * int(word.partition("x")[2] or 1)
            continue
        match = _STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is no value of promtool's notation")
        if match["value"] is not None:
            yield float(match["value"])
            continue
        each = float(match["each"] or 0) * (-1 if match["sign"] == "-" else 1)
        yield from (
            float(match["first"]) + each * number for number in range(int(match["times"]) + 1)
        )
