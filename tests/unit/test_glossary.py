"""The glossary holds against the code: each name that it gives a term exists, each term has one
row, and no two classes of the repository have the same name."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tools.code_budgets import ROOT, find_repeated_class_names, list_sources

_NAME = re.compile(r"`([^`]+)`")


def glossary_rows() -> list[list[str]]:
    """The cells of each row: term, names in the code, meaning, words of other systems."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [row for row in rows if row[0] != "term" and set(row[0]) != {"-"}]


def list_defined_names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """Yield the names that a module or a class defines, members as `Class.member`."""
    for node in body:
        match node:
            case ast.ClassDef():
                yield owner + node.name
                yield from list_defined_names(node.body, f"{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield owner + node.name
                if owner:
                    yield from (owner + name for name in list_own_attributes(node))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield owner + name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield owner + name


def list_own_attributes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@cache
def defined_names() -> frozenset[str]:
    trees = (ast.parse((ROOT / path).read_text()) for path in list_sources())
    return frozenset(name for tree in trees for name in list_defined_names(tree.body))


def find_missing_names(cell: str) -> list[str]:
    return [
        name
        for name in _NAME.findall(cell)
        if not ((ROOT / name).exists() if "/" in name else name in defined_names())
    ]


@pytest.mark.slow
def test_the_code_has_the_names_of_every_term() -> None:
    missing = {row[0]: find_missing_names(row[1]) for row in glossary_rows()}
    assert {term: names for term, names in missing.items() if names} == {}


def test_every_row_is_complete() -> None:
    """A cell without content has a dash."""
    for row in glossary_rows():
        assert len(row) == 4
        assert all(row), row
        assert _NAME.search(row[1]) or row[1] == "-", row


def test_a_missing_name_is_detected() -> None:
    assert find_missing_names("`Ticket`, `Ticket.gone`, `Gone`, `baton/gone.py`") == [
        "Ticket.gone",
        "Gone",
        "baton/gone.py",
    ]


def test_a_term_has_one_row() -> None:
    terms = [row[0] for row in glossary_rows()]
    assert len(terms) > 100
    assert sorted(terms) == sorted(set(terms))


def test_a_class_name_has_one_meaning() -> None:
    """Except one: users know `SamplingParams` from vLLM, and it becomes that of baton/types.py."""
    assert find_repeated_class_names().keys() == {"SamplingParams"}
