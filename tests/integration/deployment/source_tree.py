"""A copy of what the package is built from, so that builds leave nothing in the checkout."""

import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_OTHERS = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tools/build_backend")


def copy_source_tree(folder: Path) -> Path:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    packages = ["kernels" if name == "kv_kernels" else name for name in names]
    listed = subprocess.check_output(
        ["git", "ls-files", *packages, *_OTHERS], cwd=ROOT, text=True
    ).split()
    for name in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder
