"""The model that `up` serves when none is named: the bundled one, else a small random one that is built once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import baton
from baton.errors import ConfigError

_ROOT = Path(baton.__file__).resolve().parent.parent
_BUNDLED = Path("models", "demo")
_BUILDER = "tools.build_demo_model"


def default_model(tell: Callable[[str], None], root: Path = _ROOT) -> Path:
    """Its folder, named `demo`. Raises ConfigError where there is neither a bundled model nor the tool to build one."""
    bundled = root / _BUNDLED
    if (bundled / "config.json").exists():
        return bundled
    folder = _cache(root) / "demo"
    if (folder / "config.json").exists():
        tell(f"no model named: serving the small random one in {folder}, whose answers mean nothing")
        return folder
    if not (root / "tools" / "build_demo_model.py").exists():
        raise ConfigError("no model named, and none is bundled with this installation: name one with --model")
    tell(f"no model named and none bundled: building a small random one in {folder}, whose answers mean nothing")
    build = subprocess.run(
        [sys.executable, "-m", _BUILDER, str(folder)], cwd=root, capture_output=True, text=True, check=False
    )
    if build.returncode != 0:
        raise ConfigError(f"the demo model could not be built in {folder}: {build.stderr.strip()[-500:]}")
    return folder


def _cache(root: Path) -> Path:
    """`.demo` in a checkout, else a folder of the user's cache."""
    if (root / "pyproject.toml").exists() and os.access(root, os.W_OK):
        return root / ".demo"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "baton")
