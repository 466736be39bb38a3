"""A wheel has the native kernels and is tagged for the platform; where they cannot be built it
installs all the same, and says why."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools import build_meta

from kv_kernels.native import sources
from kv_kernels.native.build import find_kept_objects, lock_object_folder
from kv_kernels.native.native_library import NativeLibrary, open_library
from tests.integration.deployment.source_tree import ROOT, copy_source_tree
from tests.unit.kv_kernels.native_sources import require_compiler, write_fake_compiler
from tools.build_backend import baton_build

pytestmark = pytest.mark.slow
NATIVE = "kv_kernels/native"


def build_wheel(tmp_path: Path, **environ: str) -> tuple[Path, str]:
    """The wheel of the checkout, unpacked, and its file name."""
    tree = copy_source_tree(tmp_path / "tree")
    compiled = find_kept_objects()
    assert compiled is not None
    if compiled.exists():  # to compile everything again takes a minute
        with lock_object_folder(compiled):
            shutil.copytree(compiled, tree / compiled.relative_to(ROOT))
    program = (
        "import sys; sys.path[:0] = ['tools/build_backend', 'kernels'];"
        "import baton_build; print(baton_build.build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tree,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    if environ:
        assert "Baton is installed with torch kernels" in done.stderr
    return tmp_path / "site", wheel.name


def test_wheel_has_the_library_and_its_sources(tmp_path: Path) -> None:
    require_compiler()
    site, name = build_wheel(tmp_path)
    assert name.endswith("-py3-none-linux_x86_64.whl")
    native = site / NATIVE
    assert (native / "src" / "kv_native.h").exists()
    assert not (native / "tests").exists()
    assert not (native / sources.BUILD_FAILURE_NAME).exists()
    opened = open_library(native / sources.LIBRARY_NAME, folder=native / "src")
    assert isinstance(opened, NativeLibrary)


def test_wheel_of_a_failed_build_is_pure_and_says_why(tmp_path: Path) -> None:
    environ = write_fake_compiler(tmp_path / "bin", "echo 'no space' >&2; exit 1")
    site, name = build_wheel(tmp_path, **environ)
    assert name.endswith("-py3-none-any.whl")
    assert not (site / NATIVE / sources.LIBRARY_NAME).exists()
    failure = (site / NATIVE / sources.BUILD_FAILURE_NAME).read_text()
    assert "(fake 1.0) failed on" in failure.splitlines()[0]
    assert failure.endswith("no space\n")
    done = subprocess.run(
        [sys.executable, "-m", "kv_kernels.native.native_library"],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch (the build failed: " in done.stdout


def test_compiler_is_asked_for_only_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = write_fake_compiler(tmp_path, "exit 1")
    monkeypatch.delenv("CXX", raising=False)
    for name in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        monkeypatch.setattr(build_meta, name, lambda settings: ["other"])
        requires = getattr(baton_build, name)
        monkeypatch.setenv("PATH", fake["PATH"])
        assert requires() == ["other"]
        monkeypatch.setenv("PATH", "/nowhere")
        assert requires() == ["other", baton_build.COMPILER_PACKAGE]
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert requires() == ["other"], "the build says what is wrong"
        monkeypatch.delenv("CXX")
