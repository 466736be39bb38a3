"""The library of native kernels is loaded, or there is one sentence that says why not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kv_kernels.native import native_library, sources
from kv_kernels.native.build import build_library
from kv_kernels.native.native_library import (
    CpuFeature,
    NativeLibrary,
    NoNativeLibrary,
    open_library,
)
from kv_kernels.native.prototypes import ABI_VERSION
from tests.unit.kv_kernels.native_sources import (
    compile_library,
    copy_small_sources,
    require_compiler,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_small_sources(tmp_path_factory.mktemp("native") / "src")


@pytest.fixture(scope="module")
def built(folder: Path) -> Path:
    require_compiler()
    path = folder.parent / "lib.so"
    build_library(path, folder=folder)
    return path


def explain(path: Path, folder: Path, **environ: str) -> NoNativeLibrary:
    opened = open_library(path, failure=folder / "none", folder=folder, environ=environ)
    assert isinstance(opened, NoNativeLibrary), opened
    assert opened.describe() == f"torch ({opened.reason})"
    assert "\n" not in opened.reason
    return opened


def open_with(path: Path, folder: Path, features: str) -> NativeLibrary:
    opened = open_library(path, folder=folder, environ={native_library.FEATURES_VARIABLE: features})
    assert isinstance(opened, NativeLibrary), opened
    return opened


def test_features_can_only_be_removed(built: Path, folder: Path) -> None:
    everything = open_with(built, folder, ",".join(CpuFeature.__members__))
    assert everything.build_id.startswith(f"{sources.hash_sources(folder)}.")
    assert open_with(built, folder, "avx2").describe() == "native (AVX2)"
    assert open_with(built, folder, "avx2, avx512").features <= everything.features
    assert explain(built, folder, KVN_FEATURES="avx512").reason == (
        "this CPU has no AVX2 with FMA and F16C"
    )
    assert explain(built, folder, KVN_FEATURES="").fix == "", "nothing helps"
    assert "'SSE9'" in explain(built, folder, KVN_FEATURES="sse9").reason


def test_processes_that_start_at_once_choose_the_same_kernels() -> None:
    """What a process measures decides, also while others take its core."""
    command = [sys.executable, "-m", "kv_kernels.native.native_library"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    described = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0] * 8
    assert len(described) == 1
    assert described.pop().startswith("CPU kernels: ")


def test_description_of_features() -> None:
    describe = native_library.describe_features
    avx512 = CpuFeature.AVX2 | CpuFeature.AVX512
    with_vnni = avx512 | CpuFeature.AVX512_VNNI
    with_bf16 = with_vnni | CpuFeature.AVX512_BF16
    assert describe(avx512) == "AVX2", "no kernels are compiled for it"
    assert describe(with_vnni) == "AVX512, VNNI, BF16 widened to FP32"
    assert describe(with_bf16) == "AVX512, VNNI, BF16"
    assert describe(with_bf16 | CpuFeature.SLOW_BF16) == describe(with_vnni)
    for slow in (CpuFeature(0), CpuFeature.SLOW_BF16):
        assert describe(with_bf16 | CpuFeature.AMX | slow) == "AVX512, VNNI, BF16, AMX"


def test_library_that_is_not_built(tmp_path: Path, folder: Path) -> None:
    missing = explain(tmp_path / "lib.so", folder)
    assert missing.reason == "libkv_native.so is not built"
    assert "kv_kernels.native.build" in missing.fix


def test_reason_of_a_failed_build_is_told(tmp_path: Path, folder: Path) -> None:
    failure = tmp_path / "why.txt"
    failure.write_text("c++ (9.1) failed on x.cpp\nerror: unknown flag\n")
    missing = open_library(tmp_path / "lib.so", failure=failure, folder=folder, environ={})
    assert isinstance(missing, NoNativeLibrary)
    assert missing.reason == "the build failed: c++ (9.1) failed on x.cpp"
    assert "ziglang" in missing.fix


def test_stale_library(built: Path, tmp_path: Path) -> None:
    changed = copy_small_sources(tmp_path / "src")
    (changed / "kv_native.h").write_text("// other\n")
    stale = explain(built, changed)
    assert "stale" in stale.reason
    assert "kv_kernels.native.build" in stale.fix


def test_library_without_its_sources_is_used(built: Path, tmp_path: Path) -> None:
    assert isinstance(open_library(built, folder=tmp_path, environ={}), NativeLibrary)


@pytest.mark.parametrize("content", [b"", b"\x7fELF but no more", bytes(5000)])
def test_corrupt_library(tmp_path: Path, folder: Path, content: bytes) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert "cannot be loaded" in explain(path, folder).reason


def test_library_of_another_version(tmp_path: Path, folder: Path) -> None:
    path = compile_library('extern "C" int kvn_abi_version() { return 99; }', tmp_path / "lib.so")
    assert f"ABI version 99, and this version of Baton needs {ABI_VERSION}" in (
        explain(path, folder).reason
    )


def test_library_that_lacks_functions(tmp_path: Path, folder: Path) -> None:
    text = f'extern "C" int kvn_abi_version() {{ return {ABI_VERSION}; }}'
    path = compile_library(text, tmp_path / "lib.so")
    assert "undefined symbol" in explain(path, folder).reason


def test_library_of_another_program(tmp_path: Path, folder: Path) -> None:
    path = compile_library("int other() { return 1; }", tmp_path / "lib.so")
    assert "kvn_abi_version" in explain(path, folder).reason


def test_other_machines_have_none(
    built: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    other = explain(built, folder)
    assert "linux on aarch64" in other.reason
    assert other.fix == ""


def test_setting_switches_them_off() -> None:
    off = native_library.load_library("torch")
    assert isinstance(off, NoNativeLibrary)
    assert "--cpu-kernels torch" in off.reason
    assert native_library.load_library() is native_library.load_library("native"), (
        "loaded once a process"
    )


def test_versions_of_both_sides_are_the_same() -> None:
    text = (sources.SOURCE_FOLDER / "kv_native.h").read_text()
    assert re.findall(r"#define KVN_ABI_VERSION (\d+)", text) == [str(ABI_VERSION)]
