"""What runs of the soak tests measured: one table for each file, when its last test is over."""

from collections.abc import Iterator

import pytest

Figures = list[tuple[str, str, str]]  # what was done, what was measured, how much


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    found: Figures = []
    yield found
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or not found:  # another process has the terminal
        return
    widths = [max(len(row[column]) for row in found) for column in range(2)]
    terminal.write_line("")
    for deed, measure, value in found:
        terminal.write_line(f"  {deed:<{widths[0]}}  {measure:<{widths[1]}}  {value}")
