"""Imports between folders point one way: following them never leads back. What puts a process
together stands above all folders, wherever its file is."""

import ast
from collections import defaultdict
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.unit.package_layout import PYTHON_API
from tools.code_budgets import COMPOSITION_ROOTS, ROOT, list_sources
from tools.source_scan import list_imports


def test_no_folder_imports_one_that_imports_it() -> None:
    """Also by way of others."""
    modules = {_module_name(path.parts): _place(path) for path in list_sources()}
    imports = defaultdict[str, set[str]](set)
    for path in list_sources():
        if path.parts[0] == "tests" or ROOT / path == PYTHON_API:
            continue
        for node in list_imports(ROOT / path):
            for name in _imported_names(node, modules.keys()):
                if name in modules and modules[name] != _place(path):
                    imports[_place(path)].add(modules[name])
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' <- '.join(error.args[1])}") from None
    assert len(imports) > 50, "the scan looks at every folder"


def _place(path: Path) -> str:
    return str(path if path.name in COMPOSITION_ROOTS else path.parent)


def _module_name(parts: tuple[str, ...]) -> str:
    words = list(parts[1:] if parts[0] == "kernels" else parts)
    words[-1] = words[-1].removesuffix(".py")
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def _imported_names(node: ast.Import | ast.ImportFrom, modules: Collection[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules else str(node.module) for name in inner]
