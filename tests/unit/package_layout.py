"""The packages of the project: what each may import, and where its sources are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The one package file that is not empty, and the one file that imports upwards: what users import
# from `baton` is loaded from `offline` when it is used. It has a test of its own.
PYTHON_API = ROOT / "baton" / "__init__.py"

# folder -> folders of ours that it may import, beside itself
ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "baton": frozenset(),
    "kv_kernels": frozenset(),
    "kv_transfer": frozenset({"baton", "kv_kernels"}),
    "kv_pool": frozenset({"baton", "kv_transfer"}),
    "node_engine": frozenset({"baton", "kv_kernels"}),
    "prefill_node": frozenset({"baton", "node_engine", "kv_transfer"}),
    "decode_node": frozenset({"baton", "node_engine", "kv_transfer"}),
    "coordinator": frozenset({"baton"}),
    "offline": frozenset({"baton", "coordinator", "decode_node", "node_engine"}),
    "simulator": frozenset({"baton", "coordinator", "node_engine"}),
    "benchmarks": frozenset(
        {
            "baton",
            "kv_kernels",
            "kv_transfer",
            "node_engine",
            "prefill_node",
            "decode_node",
            "coordinator",
            "kv_pool",
            "offline",
            "simulator",
        }
    ),
}


def package_dir(package: str) -> Path:
    return ROOT / "kernels" / package if package == "kv_kernels" else ROOT / package


def list_sources(package: str) -> list[Path]:
    return sorted(
        path
        for path in package_dir(package).rglob("*.py")
        if "pb" not in path.relative_to(ROOT).parts and path != PYTHON_API
    )
