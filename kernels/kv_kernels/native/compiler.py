"""Finds the C++ compiler that builds the native kernels."""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kv_kernels.native.build_error import BuildError

COMPILERS = ("c++", "g++", "clang++")  # the first one on the path is used
VERSION_TIMEOUT = 60.0  # seconds
# The compiler in the package ziglang. Its defaults are this machine's own CPU and C library. glibc
# 2.17 is older than any that our dependencies run on.
_ZIG = ("-m", "ziglang", "c++")
_ZIG_TARGET = ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64")
_ZIG_LIBRARIES = ("-nostdlib++",)
_LIBRARIES = ("-nodefaultlibs", "-lpthread", "-lm", "-lc", "-lgcc")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and what is known of it."""

    command: tuple[str, ...]
    is_zig: bool = False

    @cached_property
    def version(self) -> str:
        """The first line of what `--version` prints. Raises BuildError."""
        try:
            completed = subprocess.run(
                [*self.command, "--version"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=VERSION_TIMEOUT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the compiler {self.name} does not start: {error}") from error
        return (completed.stdout.strip() or completed.stderr.strip()).partition("\n")[0]

    @property
    def name(self) -> str:
        return "ziglang" if self.is_zig else shlex.join(self.command)

    @property
    def target_flags(self) -> tuple[str, ...]:
        return _ZIG_TARGET if self.is_zig else ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """What to link with: the C library, and not the runtime library of C++."""
        return _ZIG_LIBRARIES if self.is_zig else _LIBRARIES

    def hash_toolchain(self) -> str:
        """16 hexadecimal digits for the compiler and its version."""
        known = repr((self.command, self.version, self.target_flags, self.libraries))
        return hashlib.sha256(known.encode()).hexdigest()[:16]


def find_installed_compiler(environ: Mapping[str, str] = os.environ) -> Compiler | None:
    """The compiler that $CXX names, or one on the path. Raises BuildError for a wrong $CXX."""
    path = environ.get("PATH", os.defpath)
    if chosen := environ.get("CXX", "").strip():
        try:
            command = tuple(shlex.split(chosen))
        except ValueError as error:  # a quotation without an end
            raise BuildError(f"CXX is {chosen!r}, and that is no command: {error}") from None
        if shutil.which(command[0], path=path) is None:
            raise BuildError(f"CXX is {chosen!r}, and there is no program {command[0]!r}")
        return Compiler(command, is_zig="ziglang" in command)
    for name in COMPILERS:
        if shutil.which(name, path=path):
            return Compiler((name,))
    return None


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """An installed compiler, or else the one in the package ziglang. Raises BuildError."""
    if compiler := find_installed_compiler(environ):
        return compiler
    if importlib.util.find_spec("ziglang"):
        return Compiler((sys.executable, *_ZIG), is_zig=True)
    raise BuildError(
        f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the path, CXX is not set,"
        " and the package ziglang is not installed"
    )
