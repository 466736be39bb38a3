"""How Baton was installed, so that a suggested fix names a command that works here."""

from pathlib import Path

import baton

_ROOT = Path(baton.__file__).resolve().parent.parent


def is_source_tree(root: Path | None = None) -> bool:
    """Whether this is a checkout or an editable installation of one, and not an installed wheel."""
    return (root or _ROOT).joinpath("pyproject.toml").is_file()


def reinstall_advice() -> str:
    if is_source_tree():
        return "install Baton again: pip install -e . (or make setup)"
    return "install Baton again: pip install --force-reinstall, with the wheel that it came from"


def setup_advice(python: str) -> str:
    if is_source_tree():
        return f"use Python 3.11 or newer: make setup PYTHON={python}"
    return f"use Python 3.11 or newer: {python} -m venv, and install Baton's wheel there"
