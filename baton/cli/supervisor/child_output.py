"""Copies the output lines of child processes to log files (detached) or to the terminal.

All lines pass through the supervisor, which never stops reading, so that no child waits for a disk
or a terminal. The LineWriter in front of them drops and counts what they do not take.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.cli.supervisor.rotating_file import RotatingFile
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.process import log
from baton.process.line_writer import LineWriter

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16  # longer lines are split
_KEPT_LINES = 20  # last lines of each child that are kept in memory
_ERROR_PREFIX = "error: "
_CLOSE_TIMEOUT = 1.0  # seconds to write the pending lines of all files
_DEFAULTS = Config()


class ChildOutput(Protocol):
    """Takes the output of all children of one supervisor."""

    async def copy_lines(self, name: str, stream: asyncio.StreamReader) -> None:
        """Copy the child's lines until its output ends."""
        ...

    def get_last_lines(self, name: str) -> list[str]:
        """Return the last lines of the child."""
        ...


def find_failure_message(lines: list[str]) -> str:
    """Return why a child failed: its last `error: ` line, or else its last line."""
    for line in reversed(lines):
        if line.startswith(_ERROR_PREFIX):
            return line.removeprefix(_ERROR_PREFIX)
    return lines[-1] if lines else "it said nothing"


class LineRelay:
    """Passes lines to `write(name, line)`, which must neither block nor raise.

    The last lines of each child are kept. An `error: ` line is the last line of a Baton process
    that fails. It is not passed on: the supervisor prints it once for all children that fail alike.
    """

    writes_error_lines = False  # whether `error: ` lines are passed on too

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._last_lines: defaultdict[str, deque[str]] = defaultdict(
            lambda: deque(maxlen=_KEPT_LINES)
        )

    async def copy_lines(self, name: str, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(_READ_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._handle_line(name, line)
        if pending:
            self._handle_line(name, pending)

    def get_last_lines(self, name: str) -> list[str]:
        return list(self._last_lines[name])

    def _handle_line(self, name: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._last_lines[name].append(text)
        if self.writes_error_lines or not text.startswith(_ERROR_PREFIX):
            self._write(name, text)


class LogFiles(LineRelay):
    """Writes one log file per child in `folder`: truncated at the start and rotated.

    Each file has its own writer, so that one that blocks does not hold up the others.
    """

    writes_error_lines = True

    def __init__(
        self,
        folder: Path,
        max_bytes: int = _DEFAULTS.log_max_bytes,
        backups: int = _DEFAULTS.log_backups,
    ) -> None:
        """Create the folder if needed. Raises ConfigError when that fails."""
        super().__init__(lambda name, line: self._get_writer(name).write(line))
        self.folder = folder
        self._max_bytes = max_bytes
        self._max_backups = backups
        self._writers: dict[str, LineWriter] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"log folder {folder}: {error.strerror}: choose another with --state-dir"
            ) from None

    def get_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def count_dropped_lines(self, name: str) -> int:
        """Return how many of the child's lines were not written to its file."""
        return self._writers[name].dropped_lines if name in self._writers else 0

    def close(self) -> None:
        """Write the pending lines, as far as the files take them in time, and close the files."""
        timeout_seconds = _CLOSE_TIMEOUT
        while self._writers:
            _, writer = self._writers.popitem()
            if not writer.close(timeout_seconds):
                timeout_seconds = 0.0

    def _get_writer(self, name: str) -> LineWriter:
        if name not in self._writers:
            file = RotatingFile(self.get_path(name), self._max_bytes, self._max_backups, anew=True)
            self._writers[name] = LineWriter(file, log.format_drop_notice, name=name)
        return self._writers[name]
