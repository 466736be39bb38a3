"""A small library of native kernels for tests: the real sources but those of kernels."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kv_kernels.native import sources
from kv_kernels.native.compiler import Compiler, find_installed_compiler
from kv_kernels.native.prototypes import PROTOTYPES

_SMALL = (
    "bf16_rate.h",
    "bf16_rate_avx512.cpp",
    "build_info.cpp",
    "cpu_features.cpp",
    "kv_native.h",
    sources.EXPORTS,
)


def copy_small_sources(folder: Path) -> Path:
    folder.mkdir()
    for name in _SMALL:
        shutil.copy(sources.SOURCE_FOLDER / name, folder)
    real = "".join((folder / name).read_text() for name in _SMALL if name.endswith(".cpp"))
    missing = [name for name in PROTOTYPES if f" {name}(" not in real]
    stub = 'extern "C" __attribute__((visibility("default"))) void {}() {{}}'
    (folder / "stubs.cpp").write_text("".join(f"{stub.format(name)}\n" for name in missing))
    return folder


def require_compiler() -> Compiler:
    if reason := sources.why_unsupported_machine():
        pytest.skip(reason)
    if (compiler := find_installed_compiler()) is None:
        pytest.skip("there is no C++ compiler")
    return compiler


def write_fake_compiler(folder: Path, script: str, version: str = "fake 1.0") -> dict[str, str]:
    """A program `c++` that answers --version and else runs `script`; returns the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "c++"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{script}\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "CXX": str(program)}


def compile_library(source: str, library: Path) -> Path:
    """A shared library of this C++ text alone."""
    file = library.with_suffix(".cpp")
    file.write_text(source)
    command = [*require_compiler().command, "-shared", "-fPIC", str(file), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return library
