"""Loads the library of native kernels, once a process, or says why there is none.

`python -m kv_kernels.native.native_library` prints which kernels compute on CPUs.
"""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from pathlib import Path
from typing import Literal

from kv_kernels.native import sources
from kv_kernels.native.prototypes import ABI_VERSION, PROTOTYPES

CpuKernelMode = Literal["auto", "native", "torch"]

# Names of CpuFeature, separated by commas: kernels use no others. Only tests set it.
FEATURES_VARIABLE = "KVN_FEATURES"
_BUILD = "run python -m kv_kernels.native.build"


class CpuFeature(IntFlag):
    """Groups of instructions that kernels are dispatched by, as src/kv_native.h numbers them."""

    AVX2 = 1
    AVX512 = 2
    AVX512_VNNI = 4
    AVX512_BF16 = 8
    AMX = 16
    SLOW_BF16 = 32  # measured: AVX512_BF16 takes longer than products in float32


_ALL_FEATURES = ~CpuFeature(0)
_AVX512_VNNI = CpuFeature.AVX2 | CpuFeature.AVX512 | CpuFeature.AVX512_VNNI


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library."""

    functions: ctypes.CDLL  # with the prototypes of prototypes.py; calls release Python's lock
    features: CpuFeature  # what kernels may use
    build_id: str

    def describe(self) -> str:
        return f"native ({describe_features(self.features)})"


@dataclass(frozen=True)
class NoNativeLibrary:
    """Why there are none, in one sentence, so that torch's kernels compute."""

    reason: str
    fix: str = ""  # "" if nothing helps on this machine

    def describe(self) -> str:
        return f"torch ({self.reason})"


def load_library(mode: CpuKernelMode = "auto") -> NativeLibrary | NoNativeLibrary:
    """The native kernels, unless `mode` is "torch". The library is opened once a process."""
    if mode == "torch":
        return NoNativeLibrary("switched off by --cpu-kernels torch", "set --cpu-kernels auto")
    return _load_installed_library()


@cache
def _load_installed_library() -> NativeLibrary | NoNativeLibrary:
    return open_library()


def open_library(
    path: Path = sources.LIBRARY,
    *,
    failure: Path = sources.BUILD_FAILURE,
    folder: Path | None = sources.SOURCE_FOLDER,
    environ: Mapping[str, str] = os.environ,
) -> NativeLibrary | NoNativeLibrary:
    """Open the library at `path`, or say why that cannot be.

    One that is older than the sources in `folder` is stale. If `folder` is None, nothing is
    compared.
    """
    if reason := sources.why_unsupported_machine():
        return NoNativeLibrary(reason)
    if not path.exists():
        return NoNativeLibrary(*_explain_missing(failure))
    try:
        functions = ctypes.CDLL(str(path))
        version = _declare(functions)
    except (OSError, AttributeError) as error:
        return NoNativeLibrary(f"{path.name} cannot be loaded: {error}", _BUILD)
    if version != ABI_VERSION:
        return NoNativeLibrary(
            f"{path.name} has ABI version {version}, and this version of Baton needs {ABI_VERSION}",
            _BUILD,
        )
    build_id: str = functions.kvn_build_id().decode(errors="replace")
    if folder is not None and _is_stale(build_id, folder):
        reason = f"{path.name} is stale: its sources or flags have changed since it was built"
        return NoNativeLibrary(reason, _BUILD)
    return _check_features(functions, build_id, environ)


def _is_stale(build_id: str, folder: Path) -> bool:
    has_sources = bool(sources.list_sources(folder))  # a wheel has none
    return has_sources and build_id.split(".")[0] != sources.hash_sources(folder)


def _declare(functions: ctypes.CDLL) -> int:
    """Set the types of all functions, and return the ABI version. Raises AttributeError."""
    functions.kvn_abi_version.restype = ctypes.c_int32
    version: int = functions.kvn_abi_version()
    if version == ABI_VERSION:
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    return version


def _check_features(
    functions: ctypes.CDLL, build_id: str, environ: Mapping[str, str]
) -> NativeLibrary | NoNativeLibrary:
    names = environ.get(FEATURES_VARIABLE)
    try:
        allowed = _ALL_FEATURES if names is None else parse_features(names)
    except ValueError as error:
        return NoNativeLibrary(str(error), f"unset {FEATURES_VARIABLE}")
    functions.kvn_limit_cpu_features(allowed)
    features = CpuFeature(functions.kvn_cpu_features())
    if CpuFeature.AVX2 not in features:
        return NoNativeLibrary("this CPU has no AVX2 with FMA and F16C")
    return NativeLibrary(functions, features, build_id)


def parse_features(names: str) -> CpuFeature:
    """The features in a comma-separated list. Raises ValueError for a name that is none."""
    features = CpuFeature(0)
    for name in filter(None, (part.strip().upper() for part in names.split(","))):
        if name not in CpuFeature.__members__:
            known = ", ".join(CpuFeature.__members__)
            raise ValueError(f"{FEATURES_VARIABLE} has {name!r}, which is none of {known}")
        features |= CpuFeature[name]
    return features


def describe_features(features: CpuFeature) -> str:
    """The instructions that kernels use, like "AVX512, VNNI, BF16, AMX" or "AVX2"."""
    if features & _AVX512_VNNI != _AVX512_VNNI:
        return "AVX2"
    if CpuFeature.AVX512_BF16 in features and CpuFeature.AMX in features:
        return "AVX512, VNNI, BF16, AMX"
    if CpuFeature.AVX512_BF16 in features and CpuFeature.SLOW_BF16 not in features:
        return "AVX512, VNNI, BF16"
    return "AVX512, VNNI, BF16 widened to FP32"


def _explain_missing(failure: Path) -> tuple[str, str]:
    try:
        reason = failure.read_text().partition("\n")[0]
    except OSError:
        return f"{sources.LIBRARY_NAME} is not built", _BUILD
    return (
        f"the build failed: {reason}",
        f"install a C++ compiler, such as g++ or the package ziglang, then {_BUILD}",
    )


if __name__ == "__main__":
    print(f"CPU kernels: {load_library().describe()}")  # noqa: T201
