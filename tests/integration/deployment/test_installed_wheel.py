"""What an installed wheel says of itself: it has the packages and nothing else of the
repository."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The packages as pip lays them, in a folder of their own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    site = tmp_path / "site"
    for name in (
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    ):
        source = ROOT / ("kernels" if name == "kv_kernels" else "") / name
        shutil.copytree(source, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_doctor_reports_what_the_wheel_lacks(installed: Path, tmp_path: Path) -> None:
    """No model comes with a wheel, so `baton up` without --model would refuse to start: doctor says
    so and names what works there."""
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    baton = [
        sys.executable,
        "-m",
        "baton.cli",
        "doctor",
        "--json",
        "--admin-port",
        "0",
        "--endpoint",
        "127.0.0.1:1",
    ]
    done = subprocess.run(
        baton, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["model"]["level"] == "bad"
    assert str(installed) in found["model"]["detail"]
    assert "--model" in found["model"]["fix"]
    assert found["torch"]["level"] == "ok", found["torch"]
    assert not [
        check
        for check in found.values()
        if "make setup" in check["fix"] or "pip install -e" in check["fix"]
    ]


def test_suggested_fixes_refer_to_the_wheel(installed: Path, tmp_path: Path) -> None:
    """None of a repository that is not there."""
    program = (
        "from baton.cli.checks.installation import *; "
        "print(reinstall_advice(), setup_advice('python3.12'))"
    )
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "wheel" in done.stdout
    assert "make" not in done.stdout
