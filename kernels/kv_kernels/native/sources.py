"""The sources of the native kernels, the flags that each is compiled with, and where things lie."""

import hashlib
import platform
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCE_FOLDER = FOLDER / "src"
LIBRARY_NAME = "libkv_native.so"
LIBRARY = FOLDER / LIBRARY_NAME
# Why the installation built no library: one line, then details. Gone after a build that works.
BUILD_FAILURE_NAME = "build_failure.txt"
BUILD_FAILURE = FOLDER / BUILD_FAILURE_NAME

COMPILE_FLAGS = (
    "-O3",
    "-fPIC",
    "-std=c++17",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-pthread",
    "-Wall",
    "-Wextra",
    # GCC 12 warns of its own header: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",  # Clang does not know the one before
)
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_VNNI_FLAGS = (
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    *_AVX2_FLAGS,
)
_AVX512_FLAGS = ("-mavx512bf16", *_AVX512_VNNI_FLAGS)
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", *_AVX512_FLAGS)
# No C++ runtime library: src/allocation.cpp has what the sources may use of it. What else they need
# of it is an error here rather than on a machine of another distribution.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--no-undefined")
EXPORTS = "exports.map"
_ALL_FLAGS = (COMPILE_FLAGS, _AMX_FLAGS, LINK_FLAGS)


def list_sources(folder: Path = SOURCE_FOLDER) -> list[Path]:
    return sorted(folder.glob("*.cpp"))


def list_included_files(folder: Path = SOURCE_FOLDER) -> list[Path]:
    """What compiler and linker read beside the sources: a change compiles all of them again."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".h", ".inl", ".map"))


def instruction_flags(source: Path) -> tuple[str, ...]:
    """The instructions beyond x86-64's baseline that a source may use, by the end of its name."""
    if source.stem.endswith("_amx"):
        return _AMX_FLAGS
    if source.stem.endswith("_avx512"):
        return _AVX512_FLAGS
    if source.stem.endswith("_avx512_vnni"):
        return _AVX512_VNNI_FLAGS
    return _AVX2_FLAGS if source.stem.endswith("_avx2") else ()


def hash_sources(folder: Path = SOURCE_FOLDER) -> str:
    """16 hexadecimal digits for the sources, their headers and the flags."""
    digest = hashlib.sha256(repr(_ALL_FLAGS).encode())
    for path in [*list_sources(folder), *list_included_files(folder)]:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def why_unsupported_machine() -> str:
    """Why there are no native kernels for this kind of machine; "" if there are."""
    system, machine = sys.platform, platform.machine()
    if system == "linux" and machine in ("x86_64", "AMD64"):
        return ""
    return f"native kernels are for Linux on x86-64, and this is {system} on {machine}"
