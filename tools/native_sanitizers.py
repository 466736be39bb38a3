"""`python -m tools.native_sanitizers`: the C++ tests of the native kernels under sanitizers.

Compiles the sources with kernels/kv_kernels/native/tests/*.cpp into one program for each group of
sanitizers, and runs it. Arguments: words that names of tests must contain.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv_kernels.native import sources
from kv_kernels.native.build import run_compiler
from kv_kernels.native.build_error import BuildError
from kv_kernels.native.compiler import Compiler, find_compiler

SANITIZERS = ("address,undefined", "thread")
TEST_FOLDER = sources.FOLDER / "tests"
RUN_TIMEOUT = 600.0  # seconds
_NOT_TESTED = frozenset({"allocation.cpp"})  # the sanitizers have their own new and delete
_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-std=c++17", "-pthread", "-Wall", "-Wextra")
_OPTIONS = {
    # With 1, GCC 12 aligns stack frames to 32 bytes only, and stores of AVX512 to them fault.
    # Clang has the opposite defect with 0: https://github.com/llvm/llvm-project/issues/91565
    "ASAN_OPTIONS": "detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}


def build_program(compiler: Compiler, sanitizers: str, folder: Path) -> Path:
    """Compile and link the test program into `folder`. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    checks = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")

    def compile_file(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        flags = (*_FLAGS, *checks, *sources.instruction_flags(source), f"-I{sources.SOURCE_FOLDER}")
        run_compiler(compiler, [*flags, "-c", str(source), "-o", str(target)], source.name)
        return str(target)

    files = [path for path in sources.list_sources() if path.name not in _NOT_TESTED]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        objects = list(workers.map(compile_file, [*files, *sources.list_sources(TEST_FOLDER)]))
    program = folder / "native_tests"
    run_compiler(compiler, [*_FLAGS, *checks, *objects, "-o", str(program)], program.name)
    return program


def main(words: Sequence[str]) -> int:
    failed = []
    for sanitizers in SANITIZERS:
        folder = sources.FOLDER.parents[2] / "build" / f"sanitize-{sanitizers.replace(',', '-')}"
        print(f"-fsanitize={sanitizers}", flush=True)
        try:
            program = build_program(find_compiler(), sanitizers, folder)
        except BuildError as error:
            print(f"{error.reason}\n{error.output}", file=sys.stderr)
            return 1
        environ = {**_OPTIONS, **os.environ}
        completed = subprocess.run([program, *words], env=environ, timeout=RUN_TIMEOUT, check=False)
        if completed.returncode:
            failed.append(sanitizers)
    for sanitizers in failed:
        print(f"failed: -fsanitize={sanitizers}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
