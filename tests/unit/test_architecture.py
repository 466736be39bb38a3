"""The shape of the project, enforced: who may import whom, what a pure core may not touch, how long
a file is."""

import ast
import dataclasses
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from baton.cluster_link.messages import NodeOrder
from tests.unit.package_layout import (
    ALLOWED_IMPORTS,
    PYTHON_API,
    ROOT,
    list_sources,
    package_dir,
)
from tools.source_scan import list_imported_modules, list_imported_names

# Puts a node together: it stands above all packages, and it alone knows both roles.
NODE_ASSEMBLY = ROOT / "node_engine" / "host" / "assemble.py"
OUR_PACKAGES = frozenset(ALLOWED_IMPORTS) | {"tests", "tools"}

# A core decides; it does not do. The clock is handed to it.
IMPURE = frozenset(
    {
        "torch",
        "triton",
        "zmq",
        "grpc",
        "asyncio",
        "threading",
        "time",
        "socket",
        "subprocess",
        "queue",
        "uvloop",
    }
)
# What a core exchanges with other processes is plain data; its shell converts it.
WIRE_MODULE = re.compile(r"google|baton\.pb|baton\.cluster_link\.\w*(codec|conversion|link|stream)")
# Words that every process imports cost no torch.
FORBIDDEN: dict[str, frozenset[str]] = {
    "baton": frozenset({"torch", "transformers", "triton", "numpy"}),
    "coordinator": frozenset({"torch", "triton", "numpy"}),
    "node_engine": frozenset({"transformers", "zmq"}),
    "kv_kernels": frozenset({"transformers", "zmq", "grpc"}),
    "prefill_node": frozenset({"transformers"}),
    "decode_node": frozenset({"transformers"}),
}
DANGEROUS_IMPORTS = frozenset({"pickle", "dill", "cloudpickle", "marshal", "shelve"})
DANGEROUS_CALLS = frozenset({"eval", "exec", "recv_pyobj", "send_pyobj"})


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in list_imported_modules(path)}


ALL_SOURCES = [(package, path) for package in ALLOWED_IMPORTS for path in list_sources(package)]
assert len(ALL_SOURCES) > 300, "the scan finds every file"


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_imports_point_down(package: str) -> None:
    for path in list_sources(package):
        tops = imported_packages(path)
        allowed = (
            OUR_PACKAGES - {"tests", "tools"}
            if path == NODE_ASSEMBLY
            else ALLOWED_IMPORTS[package] | {package}
        )
        assert tops & OUR_PACKAGES <= allowed, f"{path} imports {tops & OUR_PACKAGES - allowed}"
        assert not tops & FORBIDDEN.get(package, frozenset()), path
        assert not tops & DANGEROUS_IMPORTS, path


def test_cores_are_pure() -> None:
    cores = [path for _, path in ALL_SOURCES if "core" in path.relative_to(ROOT).parts]
    assert len(cores) > 50
    for path in cores:
        assert not imported_packages(path) & IMPURE, path
        wire = [name for name in list_imported_names(path) if WIRE_MODULE.match(name)]
        assert not wire, f"a core imports what messages look like: {path}: {wire}"
        shells = {
            name
            for name in list_imported_modules(path)
            if name.split(".")[0] in OUR_PACKAGES - {"baton"} and ".core" not in name
        }
        assert not shells, f"a core imports a shell: {path}: {shells}"


def test_each_order_is_built_in_one_file() -> None:
    """So that a new field of an order touches six files at most: proto, message, codec, who gives
    it, who uses it, and docs/protocol.md. See "How to add" in CONTRIBUTING.md."""
    orders = {kind.__name__ for kind in get_args(NodeOrder) if dataclasses.fields(kind)}
    builders: dict[str, set[str]] = {name: set() for name in orders}
    for _, path in ALL_SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                builders.get(node.func.id, set()).add(str(path.relative_to(ROOT)))
    codec = {"baton/cluster_link/order_codec.py"}
    assert {name: len(files - codec) for name, files in builders.items()} == dict.fromkeys(
        orders, 1
    )
    assert all(codec <= files for files in builders.values())


def test_package_files_are_empty() -> None:
    full = [
        path for _, path in ALL_SOURCES if path.name == "__init__.py" and path.read_text().strip()
    ]
    assert full == []


def test_the_python_api_is_imported_only_when_it_is_used() -> None:
    """What `baton/__init__.py` imports from `offline` by name is for type checkers alone."""
    tree = ast.parse(PYTHON_API.read_text())
    assert imported_packages(PYTHON_API) == {"importlib", "typing", "offline"}
    at_once = {
        name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for name in [node.module, *(alias.name for alias in node.names)]
    }
    assert at_once == {"importlib", "import_module", "typing", "TYPE_CHECKING", "Any"}


def test_importing_baton_loads_neither_torch_nor_what_stands_above_it() -> None:
    program = """
import sys, baton
assert not {"offline", "coordinator", "node_engine", "torch"} & sys.modules.keys()
baton.SamplingParams(max_tokens=3), baton.RequestOutput, baton.CompletionOutput, baton.LLM
assert not {"coordinator", "node_engine", "torch", "transformers"} & sys.modules.keys()
try:
    baton.Missing
except AttributeError as error:
    assert str(error) == "module 'baton' has no attribute 'Missing'"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_no_dangerous_imports_or_calls(package: str) -> None:
    for path in list_sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                check_call(node, path)


def check_call(node: ast.Call, path: Path) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    is_method = isinstance(node.func, ast.Attribute)
    assert name not in DANGEROUS_CALLS or (is_method and name in {"eval", "exec"}), (
        f"{path}: {name}()"
    )
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name == "load" and "weights_only" in keywords:
        assert ast.literal_eval(keywords["weights_only"]) is True, path


def test_there_are_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for package, path in ALL_SOURCES:
        base = package_dir(package).parent
        module = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = {
            name for name in list_imported_modules(path) if name.split(".")[0] in ALLOWED_IMPORTS
        }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done or module not in graph:
            return
        for target in graph[module]:
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_only_the_node_assembly_imports_both_roles() -> None:
    for package, path in ALL_SOURCES:
        if package not in {"benchmarks"} and path != NODE_ASSEMBLY:
            assert not {"prefill_node", "decode_node"} <= imported_packages(path) | {package}, path


@pytest.mark.parametrize("name", ["kernels", "proto"])
def test_folders_do_not_shadow_installed_packages(name: str) -> None:
    """`transformers` looks for a package called kernels, and proto-plus owns proto."""
    assert not (ROOT / name / "__init__.py").exists()
    spec = find_spec(name)
    assert spec is None or spec.origin is None or "site-packages" in spec.origin


def test_transformers_loads_models_from_the_checkout() -> None:
    assert str(ROOT) in sys.path, "as for whoever starts Python here"
    import transformers

    assert all(
        getattr(transformers, f"{kind}ForCausalLM") for kind in ("AutoModel", "Llama", "Qwen2")
    )
