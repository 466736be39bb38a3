"""Folders, files, classes and functions stay within their budgets, and the exceptions may only
shrink."""

import pytest

from tools.code_budgets import (
    BUDGETS,
    MAX_COLUMNS,
    find_long_lines,
    load_exceptions,
    measure_repository,
)


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_is_over_its_budget_but_the_exceptions(budget: str) -> None:
    allowed, found = load_exceptions()[budget], measure_repository()[budget]
    grown = {name: measure for name, measure in found.items() if measure > allowed.get(name, 0)}
    assert grown == {}, f"more than {BUDGETS[budget]}, or than its exception allows"
    assert allowed.keys() <= found.keys(), (
        "within the budget: run python -m tools.code_budgets --write"
    )


def test_no_line_is_longer_than_the_limit() -> None:
    assert find_long_lines() == [], f"more than {MAX_COLUMNS} columns"
