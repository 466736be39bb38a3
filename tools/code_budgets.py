"""`python -m tools.code_budgets`: how large folders, files, classes and functions are, against
their budgets.

Composition roots, which put a process together, may import as many modules as they need.

Budgets keep the code readable: what is over one is a reason for a cut, not for squeezing lines. The
few exceptions stand in tests/unit/budget_exceptions.toml, each with its measure, which may only
shrink: `--write` brings that file up to date.
"""

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.source_scan import list_imported_modules

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = ROOT / "tests" / "unit" / "budget_exceptions.toml"
PACKAGES = (
    "baton",
    "benchmarks",
    "coordinator",
    "decode_node",
    "kernels",
    "kv_pool",
    "kv_transfer",
    "node_engine",
    "offline",
    "prefill_node",
    "simulator",
    "tools",
)
OURS = frozenset(PACKAGES) | {"kv_kernels", "tests"}
BUDGETS = {
    "files_per_folder": 20,
    "test_files_per_folder": 30,
    "imports_per_file": 15,
    "public_members_per_class": 12,
    "lines_per_function": 40,
    "lines_per_file": 400,
}
MAX_COLUMNS = 100

# A class statement: parsing every test for them would take a second.
_CLASS = re.compile(r"\s*class (\w+)[(:\[]")

# Exempt, because of what they are rather than by a number that may shrink:
COMPOSITION_ROOTS = {"__main__.py", "assemble.py"}  # connect many parts, so import as many
ONE_DOOR = "coordinator/core/brain.py:Brain"  # everything outside the pure core calls it alone

Measures = dict[str, dict[str, int]]  # by budget: what is over it, and its measure


def list_sources() -> list[Path]:
    """The Python files of the repository that people write, relative to its root."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    return [Path(name) for name in listed if "pb" not in Path(name).parts]


@cache
def measure_repository() -> Measures:
    """Everything that is over a budget."""
    over: Measures = {name: {} for name in BUDGETS}

    def note(budget: str, name: str, measure: int) -> None:
        if measure > BUDGETS[budget]:
            over[budget][name] = measure

    paths = list_sources()
    for folder, count in Counter(path.parent for path in paths).items():
        of_tests = folder.parts[:1] == ("tests",)
        note("test_files_per_folder" if of_tests else "files_per_folder", str(folder), count)
    for path in paths:
        text = (ROOT / path).read_text()
        note("lines_per_file", str(path), len(text.splitlines()))
        if path.parts[0] == "tests":
            continue
        tree = ast.parse(text)
        if path.name not in COMPOSITION_ROOTS:
            modules = set(list_imported_modules(ROOT / path))
            ours = {name for name in modules if name.split(".")[0] in OURS}
            note("imports_per_file", str(path), len(ours))
        for name, node in _definitions(tree):
            where = f"{path}:{name}"
            if isinstance(node, ast.ClassDef):
                if where == ONE_DOOR:
                    continue
                note("public_members_per_class", where, len(_public_members(node)))
            elif path.parts[0] != "kernels":
                note("lines_per_function", where, _lines_of(node))
    return over


def find_repeated_class_names() -> dict[str, list[str]]:
    """Classes of one name in more than one place."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in list_sources():
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if found := _CLASS.match(line):
                places[found[1]].append(f"{path}:{number}")
    return {name: found for name, found in places.items() if len(found) > 1}


def find_long_lines() -> list[str]:
    """Lines of more than MAX_COLUMNS characters, as `path:line`."""
    return [
        f"{path}:{number}"
        for path in list_sources()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


def load_exceptions() -> Measures:
    return tomllib.loads(EXCEPTIONS.read_text())


def _definitions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")


def _public_members(node: ast.ClassDef) -> set[str]:
    """Methods and properties: a record may have as many fields as what it describes."""
    methods = {
        item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name for name in methods if not name.startswith("_")}


def _lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without its docstring."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    lines = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.code_budgets", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the file of exceptions")
    options = parser.parse_args()
    lines = []
    for budget, found in measure_repository().items():
        lines.append(f"[{budget}]  # budget {BUDGETS[budget]}")
        lines += [f'"{name}" = {measure}' for name, measure in sorted(found.items())] + [""]
    text = "\n".join(lines)
    if options.write:
        EXCEPTIONS.write_text(
            "# What is over a budget, and by how much at most. See tools/code_budgets.py.\n\n"
            + text
        )
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
