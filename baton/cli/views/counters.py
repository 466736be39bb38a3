"""Sum the counters of a status over their labels."""

import re
from collections.abc import Mapping

_LABELS = re.compile(r'(\w+)="([^"]*)"')


def sum_counter(counters: Mapping[str, float], name: str, **labels: str) -> float:
    """Return the sum of a counter over all its labels except the given ones."""
    found = 0.0
    for key, value in counters.items():
        base, _, label_text = key.partition("{")
        if base == name and labels.items() <= dict(_LABELS.findall(label_text)).items():
            found += value
    return found
