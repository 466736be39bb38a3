"""The standard library of this Python as text: which files are used, and which are held out."""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 20  # one file of so many is held out
MAX_FILE_CHARACTERS = 300_000  # longer files are tables
MAX_LINE_CHARACTERS = 500  # characters
MAX_REPEATED_SHARE = 0.6  # a file with a greater share of lines from earlier files is a copy
MIN_DISTINCTIVE_LINE = 20  # shorter lines occur in many files

# Generated tables, third-party packages, and files with paths of the build machine.
_SKIPPED_FOLDERS = {
    "site-packages",
    "encodings",
    "pydoc_data",
    "lib-dynload",
    "__pycache__",
    "_bundled",
}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_TEST_FOLDERS = {"test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file."""

    name: str  # path below the library's folder
    text: str
    is_test: bool
    is_held_out: bool

    @property
    def module_name(self) -> str:
        parts = self.name.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def standard_library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def collect_sources(root: Path) -> Iterator[SourceFile]:
    """Yield files that parse as Python, the library before its tests, without near copies."""
    paths = sorted(path for path in root.rglob("*.py") if not _is_skipped(path.relative_to(root)))
    paths.sort(key=lambda path: _is_test(path.relative_to(root)))
    seen: set[str] = set()
    for path in paths:
        text = _read_source(path)
        if text is None:
            continue
        lines = {
            line.strip() for line in text.splitlines() if len(line.strip()) >= MIN_DISTINCTIVE_LINE
        }
        if len(lines & seen) > MAX_REPEATED_SHARE * len(lines):
            continue
        seen |= lines
        relative = path.relative_to(root)
        yield SourceFile(
            relative.as_posix(), text, _is_test(relative), is_held_out(relative.as_posix())
        )


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def parse_python(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None


def _is_skipped(relative: Path) -> bool:
    return any(
        part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in relative.parts
    )


def _is_test(relative: Path) -> bool:
    return any(part in _TEST_FOLDERS for part in relative.parts[:-1])


def _read_source(path: Path) -> str | None:
    try:
        raw = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    text = "\n".join(line.rstrip() for line in raw.expandtabs(8).split("\n")).strip("\n") + "\n"
    if (
        not 50 < len(text) <= MAX_FILE_CHARACTERS
        or max(map(len, text.split("\n"))) > MAX_LINE_CHARACTERS
    ):
        return None
    return text if parse_python(text) else None
