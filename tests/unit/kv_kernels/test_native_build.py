"""The build of the native kernels: what it takes for up to date, and what it says when it fails."""

import errno
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kv_kernels.native import build, sources
from kv_kernels.native.build_error import BuildError
from kv_kernels.native.compiler import find_compiler, find_installed_compiler
from kv_kernels.native.native_library import NativeLibrary, open_library
from tests.unit.kv_kernels.native_sources import (
    copy_small_sources,
    require_compiler,
    write_fake_compiler,
)

WITHOUT_COMPILER = {"PATH": "/nowhere"}
# Symbols that the linker merges between files: one compiled for AVX512 could serve everyone.
MERGED_SYMBOL_KINDS = frozenset("WwVvu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_small_sources(tmp_path / "src")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "lib.so"


@pytest.fixture
def without_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.slow
def test_sources_compile_without_warnings(tmp_path: Path, library: Path) -> None:
    require_compiler()
    objects = build.find_kept_objects()
    assert objects is not None
    result = build.build_library(library, objects=objects)
    assert result.rebuilt
    assert result.warnings == ""
    assert isinstance(open_library(library), NativeLibrary)
    assert [path.name for path in tmp_path.iterdir()] == ["lib.so"]
    check_that_variants_share_no_code(objects)


def check_that_variants_share_no_code(objects: Path) -> None:
    """A function that the linker takes from any of several files must not be one that only some
    CPUs can run."""
    if shutil.which("nm") is None:
        return
    for source in sources.list_sources():
        if sources.instruction_flags(source):
            [path] = objects.glob(f"{source.stem}.*.o")
            lines = subprocess.check_output(["nm", "-C", "--defined-only", path], text=True)
            merged = [
                line
                for line in lines.splitlines()
                if line.split(maxsplit=2)[1] in MERGED_SYMBOL_KINDS
            ]
            assert merged == [], source.name


def test_library_is_rebuilt_only_after_a_change(
    tmp_path: Path, folder: Path, library: Path
) -> None:
    real = shutil.which(require_compiler().command[0])

    def was_built(version: str) -> bool:
        environ = write_fake_compiler(tmp_path / "bin", f'exec {real} "$@"', version)
        return build.build_library(library, folder=folder, environ=environ).rebuilt

    assert was_built("one 1.0")
    assert not was_built("one 1.0")
    assert was_built("one 2.0")
    (folder / "kv_native.h").write_text((folder / "kv_native.h").read_text() + "\n// more\n")
    assert was_built("one 2.0")
    (folder / "other.cpp").write_text("// nothing\n")
    assert was_built("one 2.0")
    assert not was_built("one 2.0")


def test_only_changed_sources_are_compiled_again(
    tmp_path: Path, folder: Path, library: Path
) -> None:
    require_compiler()
    objects = tmp_path / "objects"
    build.build_library(library, folder=folder, objects=objects)
    before = {path.name for path in objects.iterdir()}
    (folder / "cpu_features.cpp").write_text(
        (folder / "cpu_features.cpp").read_text() + "// more\n"
    )
    build.build_library(library, folder=folder, objects=objects)
    after = {path.name for path in objects.iterdir()}
    # build_info.cpp has the hash of all sources
    assert {name.partition(".")[0] for name in after - before} == {"build_info", "cpu_features"}
    assert len(after) == len(before)


def test_flags_follow_the_name_of_a_source() -> None:
    assert "-mavx512bf16" in sources.instruction_flags(Path("dot_avx512.cpp"))
    without_bf16 = sources.instruction_flags(Path("dot_avx512_vnni.cpp"))
    assert "-mavx512vnni" in without_bf16
    assert "-mavx512bf16" not in without_bf16
    assert sources.instruction_flags(Path("dot_avx2.cpp")) == ("-mavx2", "-mfma", "-mf16c")
    assert sources.instruction_flags(Path("avx512_dispatch.cpp")) == ()


def test_failed_build_keeps_the_reason_and_no_old_library(
    tmp_path: Path, folder: Path, library: Path
) -> None:
    library.write_bytes(b"of other sources")
    failure = tmp_path / "why.txt"
    environ = write_fake_compiler(tmp_path / "bin", "seq 100 >&2; echo 'no space' >&2; exit 1")

    def build_with_fake(target: Path) -> build.BuildResult:
        return build.build_library(target, folder=folder, environ=environ)

    error = build.build_or_explain(library, failure, build_with_fake)
    assert isinstance(error, BuildError)
    assert not library.exists()
    first, *rest = failure.read_text().splitlines()
    assert "(fake 1.0) failed on bf16_rate_avx512.cpp" in first
    assert rest[0] == "82"
    assert rest[-1] == "no space"
    text = build.format_failure(error)
    assert "no space" in text
    assert text.endswith(build.CONSEQUENCE)


@pytest.mark.parametrize("kind", ["source", "library"])
def test_compiler_that_writes_nothing(
    tmp_path: Path, folder: Path, library: Path, kind: str
) -> None:
    real = shutil.which(require_compiler().command[0])
    script = (
        f'[ "$1" = {sources.COMPILE_FLAGS[0]} ] && exec {real} "$@"' if kind == "library" else ""
    )
    environ = write_fake_compiler(tmp_path / "bin", f"{script}\nexit 0")
    what = r"lib\.so" if kind == "library" else r"bf16_rate_avx512\.cpp"
    with pytest.raises(BuildError, match=rf"\(fake 1\.0\) wrote no output for {what}"):
        build.build_library(library, folder=folder, environ=environ)


@pytest.fixture
def read_only_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be neither removed nor written."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)


@pytest.mark.usefixtures("read_only_disk")
def test_results_of_a_build_on_a_read_only_disk(tmp_path: Path, library: Path) -> None:
    current = build.BuildResult(library, "c++ 1.0", rebuilt=False)
    failure = tmp_path / "why.txt"
    assert build.build_or_explain(library, failure, lambda _: current) is current

    def fail(_: Path) -> build.BuildResult:
        raise BuildError("a reason")

    result = build.build_or_explain(library, failure, fail)
    assert isinstance(result, BuildError)
    assert result.reason == "a reason"


@pytest.mark.usefixtures("read_only_disk")
def test_forced_build_on_a_read_only_disk(
    tmp_path: Path,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sources, "LIBRARY", library)
    monkeypatch.setattr(sources, "BUILD_FAILURE", tmp_path / "why.txt")
    assert build.main(["--force"]) == 1
    assert f"{library} cannot be removed: Read-only file system" in capsys.readouterr().err


def test_reason_is_gone_after_a_build_that_works(
    tmp_path: Path, folder: Path, library: Path
) -> None:
    require_compiler()
    failure = tmp_path / "why.txt"
    failure.write_text("it was worse\n")
    build.build_or_explain(
        library, failure, lambda target: build.build_library(target, folder=folder)
    )
    assert not failure.exists()
    assert library.exists()


def test_failed_link_leaves_nothing(tmp_path: Path, folder: Path, library: Path) -> None:
    """Sources that need the runtime library of C++ fail here, not where it is another version."""
    require_compiler()
    (folder / "other.cpp").write_text(
        'extern "C" int* kvn_other();\nint* kvn_other() { return new int(1); }\n'
    )
    with pytest.raises(BuildError, match=r"failed on lib\.so") as caught:
        build.build_library(library, folder=folder)
    assert "operator new" in caught.value.output
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_library_folder_that_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    require_compiler()
    with pytest.raises(BuildError, match=r"lib\.so"):
        build.build_library(tmp_path / "nowhere" / "lib.so", folder=folder)


@pytest.mark.usefixtures("without_ziglang")
def test_machine_without_any_compiler(folder: Path, library: Path) -> None:
    with pytest.raises(BuildError, match=r"none of c\+\+, g\+\+, clang\+\+ is on the path"):
        build.build_library(library, folder=folder, environ=WITHOUT_COMPILER)


@pytest.mark.usefixtures("without_ziglang")
def test_current_library_needs_no_compiler(folder: Path, library: Path) -> None:
    """As where pip brought a compiler for the time of the installation."""
    require_compiler()
    build.build_library(library, folder=folder)
    assert not build.build_library(library, folder=folder, environ=WITHOUT_COMPILER).rebuilt
    (folder / "kv_native.h").write_text("// other\n")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.build_library(library, folder=folder, environ=WITHOUT_COMPILER)


def test_ziglang_is_used_only_without_an_installed_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "ziglang")
    compiler = find_compiler(WITHOUT_COMPILER)
    assert compiler.is_zig
    assert compiler.command[1:] == ("-m", "ziglang", "c++")
    assert "-mcpu=x86_64" in compiler.target_flags, "not for the CPU of the machine that builds"
    fake = write_fake_compiler(tmp_path, "exit 1")
    assert not find_compiler({"PATH": fake["PATH"]}).is_zig


def test_cxx_names_the_compiler(tmp_path: Path) -> None:
    environ = write_fake_compiler(tmp_path, "exit 1")
    compiler = find_installed_compiler({**environ, "CXX": f"{tmp_path}/c++ -m64"})
    assert compiler is not None
    assert compiler.command == (f"{tmp_path}/c++", "-m64")
    with pytest.raises(BuildError, match="no program 'no-such-compiler'"):
        find_installed_compiler({**environ, "CXX": "no-such-compiler"})
    with pytest.raises(BuildError, match="that is no command: No closing quotation"):
        find_installed_compiler({**environ, "CXX": 'c++ "'})


def test_other_machines_build_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(BuildError, match="linux on aarch64"):
        build.build_library(library)
