"""An installation on a machine without a compiler, which takes ziglang from the package index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_kernels.native.sources import why_unsupported_machine
from tests.integration.deployment.source_tree import copy_source_tree


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(why_unsupported_machine()), reason="there are no native kernels for it")
def test_installation_without_a_compiler(tmp_path: Path) -> None:
    tree = copy_source_tree(tmp_path / "tree")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "CXX"}
    environ["PATH"] = str(python.parent)
    command = [str(python), "-m", "pip", "install", "--no-deps", str(tree)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = subprocess.check_output(
        [python, "-m", "kv_kernels.native.native_library"], cwd=tmp_path, env=environ, text=True
    )
    assert told.startswith("CPU kernels: native ("), told
