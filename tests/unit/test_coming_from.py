"""docs/coming-from.md: every name of Baton in its tables is one of Baton's."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.routing import Route
from typer.main import get_command

from baton.cli.main import app as command_line
from baton.config.settings import FIELD_NAMES, Config
from coordinator.frontend.auth import ClientAuthenticator
from coordinator.frontend.http.app import build_app
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.admin_app import build_admin_app
from coordinator.operators.metrics import CoordinatorMetrics
from offline.batch.__main__ import make_parser
from tests.unit.test_docs import ROOT, section, table_rows

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
_METHODS = ("GET", "POST")


def list_flags() -> set[str]:
    options = {f"--{field.replace('_', '-')}" for field in FIELD_NAMES}
    return options | {name for action in make_parser()._actions for name in action.option_strings}


def list_routes() -> set[str]:
    """Every route of clients and operators, as `METHOD /path`."""
    fake: Any = MagicMock()
    apps = (
        build_app(fake, fake, ClientAuthenticator()),
        build_admin_app(fake, fake, "", fake),
    )
    return {
        f"{method} {route.path.replace(':path}', '}')}"
        for app in apps
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    } | {"GET /metrics"}


async def list_metrics() -> set[str]:
    metrics = CoordinatorMetrics(Dispatcher(Config()))
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }


def names_in(title: str, pattern: str) -> set[str]:
    """What the last column of a section's table has between backticks, of this form."""
    rows = table_rows(section(PAGE, title))
    assert len(rows) > 5
    return {name for row in rows for name in re.findall(f"`({pattern})`", row[-1])}


@pytest.mark.parametrize(
    ("title", "pattern", "known"),
    [
        ("Flags", r"--[\w-]+", list_flags),
        ("Routes", rf"(?:{'|'.join(_METHODS)}) /[^`]*", list_routes),
    ],
)
def test_flags_and_routes_exist(title: str, pattern: str, known: Callable[[], set[str]]) -> None:
    named = names_in(title, pattern)
    assert len(named) > 8
    assert named <= known()


async def test_metrics_exist() -> None:
    named = names_in("Metrics", r"baton_\w+")
    assert len(named) > 10
    assert named <= await list_metrics()


def test_commands_and_their_options_exist() -> None:
    commands = get_command(command_line).commands  # type: ignore[attr-defined]
    used = re.findall(r"`baton ([\w-]+)([^`]*)`", PAGE)
    assert {name for name, _ in used} >= {"up", "run-batch", "explain"}
    assert {name for name, _ in used} <= commands.keys()
    assert {flag for _, rest in used for flag in re.findall(r"--[\w-]+", rest)} <= list_flags()


def test_every_row_has_every_column() -> None:
    for title, columns in (("Start", 3), ("Flags", 7), ("Routes", 7), ("Metrics", 6)):
        rows = table_rows(section(PAGE, title))
        assert {len(row) for row in rows} == {columns}, title
        assert all(cell for row in rows for cell in row), title


def test_a_name_of_another_system_is_no_name_of_baton() -> None:
    assert "--tensor-parallel-size" not in list_flags()
    assert "GET /v2/health/ready" not in list_routes()
