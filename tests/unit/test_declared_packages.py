"""Every package that the code imports is declared in pyproject.toml, where it is needed: what runs
in a cluster as a dependency, the rest in an extra. A package that comes along with another one may
be gone with its next version."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tools.source_scan import list_imports

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PRODUCT = [
    name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
]
OUR_PACKAGES = {*PRODUCT, "tests", "tools"}
# Imported only where something else has brought it: a GPU build of torch, and the extra that draws
# pictures.
OPTIONAL = {"triton", "matplotlib"}


# Run by `make clients` in an environment of its own, with the packages of this file.
CLIENT_CALLS = "tests/clients/client_calls.py"
CLIENT_REQUIREMENTS = ROOT / "tests" / "clients" / "requirements.txt"


def list_imported_packages(folder: str) -> dict[str, set[str]]:
    """Packages of others, each with the files that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / folder).rglob("*.py"):
        for name in _names(path):
            if name not in sys.stdlib_module_names and name not in OUR_PACKAGES:
                found[name].add(str(path.relative_to(ROOT)))
    return found


def _names(path: Path) -> Iterator[str]:
    for node in list_imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def normalized(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def list_declared(*extras: str) -> set[str]:
    lines = [
        *PROJECT["project"]["dependencies"],
        *(line for extra in extras for line in EXTRAS[extra]),
    ]
    return {normalized(line) for line in lines}


@cache
def list_providers() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def find_undeclared(packages: dict[str, set[str]], known: set[str]) -> dict[str, set[str]]:
    providers = list_providers()
    return {
        name: files
        for name, files in packages.items()
        if not {normalized(provider) for provider in providers.get(name, [name])} & known
    }


@pytest.mark.parametrize("package", PRODUCT)
def test_what_the_product_imports_is_a_dependency(package: str) -> None:
    folder = "kernels" if package == "kv_kernels" else package
    found = {
        name: files
        for name, files in list_imported_packages(folder).items()
        if name not in OPTIONAL
    }
    assert find_undeclared(found, list_declared()) == {}


@pytest.mark.parametrize("folder", ["tests", "tools"])
def test_what_tests_and_tools_import_is_in_the_extra(folder: str) -> None:
    found = {name: files - {CLIENT_CALLS} for name, files in list_imported_packages(folder).items()}
    shared = {name: files for name, files in found.items() if files}
    assert find_undeclared(shared, list_declared("test")) == {}


def test_what_the_clients_import_is_required_with_its_version() -> None:
    lines = CLIENT_REQUIREMENTS.read_text().splitlines()
    required = {normalized(line) for line in lines if "==" in line}
    assert len(required) == len([line for line in lines if not line.startswith("#")])
    imported = {
        normalized(name)
        for name, files in list_imported_packages("tests").items()
        if CLIENT_CALLS in files
    }
    assert imported
    assert imported <= required


def test_optional_packages_are_in_an_extra() -> None:
    assert list_declared(*EXTRAS) - list_declared() >= OPTIONAL


def test_transitive_dependency_is_detected() -> None:
    assert find_undeclared({"click": {"baton/x.py"}, "zmq": {"baton/y.py"}}, {"pyzmq"}) == {
        "click": {"baton/x.py"}
    }


def test_jinja_version_has_a_safe_sandbox() -> None:
    """Chat templates come with models. Before 3.1.6 a template could get out of the sandbox
    (CVE-2025-27516)."""
    [line] = [line for line in PROJECT["project"]["dependencies"] if normalized(line) == "jinja2"]
    assert line.startswith("jinja2>=3.1.6")
