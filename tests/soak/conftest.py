"""What runs of the soak tests measured: one table for each file, when its last test is over."""

import sys
from collections.abc import Iterator

import pytest

Figures = list[tuple[str, str, str]]  # what was done, what was measured, how much


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    found: Figures = []
    yield found
    if not found:
        return
    widths = [max(len(row[column]) for row in found) for column in range(2)]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        lines = [
            f"  {deed:<{widths[0]}}  {measure:<{widths[1]}}  {value}"
            for deed, measure, value in found
        ]
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
