"""Builds Baton's packages: setuptools' backend, and the native CPU kernels.

A wheel with the library of native kernels is tagged for Linux on x86-64. Where they cannot be
built, the wheel is pure, and kv_kernels/native/build_failure.txt in it says why.
"""

import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

from setuptools import Command, build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from kv_kernels.native import sources
from kv_kernels.native.build import build_incrementally, build_or_explain, format_failure
from kv_kernels.native.build_error import BuildError
from kv_kernels.native.compiler import find_installed_compiler

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

COMPILER_PACKAGE = "ziglang>=0.15,<0.18"  # for machines without a compiler
_PACKAGE = Path("kv_kernels/native")
_BUILT = (sources.LIBRARY_NAME, sources.BUILD_FAILURE_NAME)

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_list_compilers()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_list_compilers()]


def _list_compilers() -> list[str]:
    """The package with a compiler, if this machine has none and a compiler is of use."""
    if sources.why_unsupported_machine():
        return []
    try:
        return [] if find_installed_compiler() else [COMPILER_PACKAGE]
    except BuildError:  # of a wrong $CXX: the build says so
        return []


class BuildPackages(build_py):
    """Adds the native library, or the reason why there is none, to the installed package."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            build_native(sources.FOLDER)
            return
        built = _build_folder(self)
        build_native(built)
        package = Path(self.build_lib, _PACKAGE)
        package.mkdir(parents=True, exist_ok=True)
        for name in _BUILT:
            (package / name).unlink(missing_ok=True)
            if (built / name).exists():
                shutil.copy2(built / name, package)


class BuildWheel(bdist_wheel):
    """Tags a wheel that has the native library for the platform, and any for all Pythons 3."""

    def run(self) -> None:
        # First, because where files go in a wheel depends on whether it is pure.
        if build_native(_build_folder(self)):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def _build_folder(command: Command) -> Path:
    folder = Path(command.get_finalized_command("build").build_base, "native")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def build_native(folder: Path) -> bool:
    """Build the library in `folder`, once. Returns whether that worked, and prints why not."""
    result = build_or_explain(
        folder / sources.LIBRARY_NAME, folder / sources.BUILD_FAILURE_NAME, build_incrementally
    )
    if isinstance(result, BuildError):
        print(format_failure(result), file=sys.stderr)
        return False
    return True
