"""`python -m kv_kernels.native.build`: builds the library of native kernels beside this package.

Needs only the standard library, because installations build before any dependency is there.
"""

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from kv_kernels.native import sources
from kv_kernels.native.build_error import BuildError
from kv_kernels.native.compiler import Compiler, find_compiler

# Seconds for one file. ziglang also builds its runtime library at its first use.
COMPILE_TIMEOUT = 600.0
_MAX_OUTPUT_LINES = 20
_BUILD_INFO = "build_info.cpp"  # the one source that KVN_BUILD_ID is defined for
CONSEQUENCE = "Baton is installed with torch kernels: they compute the same, more slowly."


@dataclass(frozen=True)
class BuildResult:
    """A library that is up to date."""

    path: Path
    compiler: str  # name and version; "" if there is none, and the library needs none
    rebuilt: bool  # False: it was up to date already
    warnings: str = ""  # what the compiler said


def build_library(
    library: Path = sources.LIBRARY,
    *,
    folder: Path = sources.SOURCE_FOLDER,
    objects: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> BuildResult:
    """Build the sources in `folder` into `library`, unless it is up to date. Raises BuildError.

    Compiled files are kept in `objects` for the next build, or in a temporary folder.
    """
    if reason := sources.why_unsupported_machine():
        raise BuildError(reason)
    sources_hash = sources.hash_sources(folder)
    try:
        compiler = find_compiler(environ)
    except BuildError:
        if is_built_from(library, sources_hash):
            return BuildResult(library, "", rebuilt=False)
        raise
    build_id = f"{sources_hash}.{compiler.hash_toolchain()}"
    if is_built_from(library, build_id):
        return BuildResult(library, compiler.version, rebuilt=False)
    with tempfile.TemporaryDirectory(prefix="kv-native-") as scratch:
        kept = objects or Path(scratch, "objects")
        job = _Build(compiler, folder, kept, build_id, _build_environment(environ, Path(scratch)))
        try:
            kept.mkdir(parents=True, exist_ok=True)
            with lock_object_folder(kept):
                job.link(job.compile_all(), library)
        except OSError as error:
            raise BuildError(f"{kept} cannot be written: {error.strerror}") from error
    warnings = "\n".join(filter(None, job.warnings))
    return BuildResult(library, compiler.version, rebuilt=True, warnings=warnings)


def find_kept_objects() -> Path | None:
    """Where a checkout keeps what is compiled, so that a change compiles one file again."""
    root = sources.FOLDER.parents[2]
    return root / "build/native-objects" if (root / "pyproject.toml").is_file() else None


def build_incrementally(library: Path) -> BuildResult:
    return build_library(library, objects=find_kept_objects())


@contextmanager
def lock_object_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of object files, so that builds take turns. Raises OSError."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_built_from(library: Path, build_id: str) -> bool:
    """Whether the file at `library` contains `build_id`. The library is not loaded for that."""
    try:
        return build_id.encode() in library.read_bytes()
    except OSError:
        return False


def build_or_explain(
    library: Path, failure: Path, build: Callable[[Path], BuildResult] = build_library
) -> BuildResult | BuildError:
    """Build `library`. A failure is written to `failure`, and no older library is left.

    Both stay as they are on a file system that cannot be written.
    """
    try:
        result = build(library)
    except BuildError as error:
        with suppress(OSError):
            library.unlink(missing_ok=True)
            failure.write_text(f"{error.reason}\n{error.output}".rstrip() + "\n")
        return error
    with suppress(OSError):
        failure.unlink()
    return result


@dataclass(frozen=True)
class _Build:
    compiler: Compiler
    folder: Path
    objects: Path
    build_id: str
    environ: Mapping[str, str]
    warnings: list[str] = field(default_factory=list)

    def compile_all(self) -> list[Path]:
        """Compile all sources, as many at a time as there are cores."""
        files = sources.list_sources(self.folder)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
            return list(workers.map(self._compile, files))

    def link(self, objects: Sequence[Path], library: Path) -> None:
        """Link into a new file that then takes the place of `library`."""
        new = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            inputs = [*map(str, objects), *self.compiler.libraries]
            exports = f"-Wl,--version-script={self.folder / sources.EXPORTS}"
            flags = [*sources.LINK_FLAGS, exports]
            self.warnings.append(self._run([*flags, *inputs], new, library.name))
            new.replace(library)
        except OSError as error:
            raise BuildError(f"{library} cannot be written: {error.strerror}") from error
        finally:
            with suppress(OSError):
                new.unlink()

    def _compile(self, source: Path) -> Path:
        flags = [*sources.COMPILE_FLAGS, *sources.instruction_flags(source)]
        if source.name == _BUILD_INFO:
            flags.append(f'-DKVN_BUILD_ID="{self.build_id}"')
        target = self.objects / f"{source.stem}.{self._hash_inputs(source, flags)}.o"
        warnings = target.with_suffix(".warnings")
        if not (target.exists() and warnings.exists()):
            new = target.with_suffix(".new")
            warnings.write_text(self._run([*flags, "-c", str(source)], new, source.name))
            new.replace(target)
        for other in self.objects.glob(f"{source.stem}.*"):
            if other not in (target, warnings):
                other.unlink()
        self.warnings.append(warnings.read_text())
        return target

    def _hash_inputs(self, source: Path, flags: Sequence[str]) -> str:
        digest = sha256(repr((flags, self.compiler.hash_toolchain())).encode())
        for path in [source, *sources.list_included_files(self.folder)]:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def _run(self, arguments: Sequence[str], output: Path, what: str) -> str:
        """Run the compiler, which writes `output`; returns its warnings. Raises BuildError."""
        output.unlink(missing_ok=True)
        command = [*arguments, "-o", str(output)]
        warnings = run_compiler(self.compiler, command, what, self.environ)
        if not output.exists():
            name, version = self.compiler.name, self.compiler.version
            raise BuildError(f"{name} ({version}) wrote no output for {what}", warnings)
        return warnings


def run_compiler(
    compiler: Compiler,
    arguments: Sequence[str],
    what: str,  # the file that is made, for messages
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Run the compiler; returns its warnings. Raises BuildError with the last lines of errors."""
    try:
        completed = subprocess.run(
            [*compiler.command, *compiler.target_flags, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT,
            check=False,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler {compiler.name} failed: {error}") from error
    output = completed.stdout.strip()
    if completed.returncode:
        reason = f"{compiler.name} ({compiler.version}) failed on {what}"
        raise BuildError(reason, "\n".join(output.splitlines()[-_MAX_OUTPUT_LINES:]))
    return output


def _build_environment(environ: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The compiler's environment; ziglang keeps its caches in `scratch` and not in the home."""
    caches = {
        "ZIG_GLOBAL_CACHE_DIR": str(scratch / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(scratch / "zig-local"),
    }
    return {**caches, "LC_ALL": "C", **environ}


def format_failure(error: BuildError) -> str:
    """What an installation prints about a build that failed."""
    parts = ("The native CPU kernels are not built:", error.reason, error.output, CONSEQUENCE)
    return "\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kv_kernels.native.build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build again what is up to date")
    options = parser.parse_args(arguments)
    library = sources.LIBRARY
    try:
        if options.force:
            library.unlink(missing_ok=True)
    except OSError as error:
        print(f"{library} cannot be removed: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    result = build_or_explain(library, sources.BUILD_FAILURE, build_incrementally)
    if isinstance(result, BuildError):
        print(format_failure(result), file=sys.stderr)  # noqa: T201
        return 1
    if result.warnings:
        print(result.warnings, file=sys.stderr)  # noqa: T201
    done = "built" if result.rebuilt else "up to date"
    print(f"{result.path}: {done} ({result.compiler or 'no compiler'})")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
