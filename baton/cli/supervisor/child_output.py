"""Where the lines of child processes go: to log files (detached), or to the terminal with their
names.

All of them pass through the supervisor, which never stops reading: a child does not wait for a disk
or a terminal. What those do not take is dropped and counted by the LineWriter in front of them.
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
_MAX_LINE_BYTES = 1 << 16  # bytes; longer ones are broken
_KEPT_LINES = 20  # lines
_ERROR_PREFIX = "error: "
_CLOSE_TIMEOUT = 1.0  # seconds for all files together to take them
_DEFAULTS = Config()


class ChildOutput(Protocol):
    """The sink of all children of one supervisor."""

    async def copy_lines(self, name: str, stream: asyncio.StreamReader) -> None:
        """Carry the child's lines until its end."""
        ...

    def get_last_lines(self, name: str) -> list[str]:
        """The child's last lines."""
        ...


def find_failure_message(lines: list[str]) -> str:
    """What a child that gave up said: its `error: ` line, else its last line."""
    for line in reversed(lines):
        if line.startswith(_ERROR_PREFIX):
            return line.removeprefix(_ERROR_PREFIX)
    return lines[-1] if lines else "it said nothing"


class LineRelay:
    """Lines pass through `write(name, line)`, which neither blocks nor raises, and the last few of
    each child are remembered. An `error: ` line is what a process of ours says last: the supervisor
    tells it, once, for all the children that may say the same."""

    writes_error_lines = False

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._last_lines: defaultdict[str, deque[str]] = defaultdict(
            lambda: deque(maxlen=_KEPT_LINES)
        )

    async def copy_lines(self, name: str, stream: asyncio.StreamReader) -> None:
        pending = b""
        while chunk := await stream.read(_READ_BYTES):
            *whole, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                whole, pending = [*whole, pending], b""
            for line in whole:
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
    """One file per child in `folder`, begun anew by this supervisor and rotated. Each has a writer
    of its own: one that blocks holds up no other."""

    writes_error_lines = True

    def __init__(
        self,
        folder: Path,
        max_bytes: int = _DEFAULTS.log_max_bytes,
        backups: int = _DEFAULTS.log_backups,
    ) -> None:
        """Raises ConfigError when there is no such folder and none can be made."""
        super().__init__(lambda name, line: self._get_writer(name).write(line))
        self.folder = folder
        self._max_bytes = max_bytes
        self._max_backups = backups
        self._writers: dict[str, LineWriter] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"folder of logs {folder}: {error.strerror}: choose another with --state-dir"
            ) from None

    def get_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def count_dropped_lines(self, name: str) -> int:
        """Lines of a child that its file did not take."""
        return self._writers[name].dropped_lines if name in self._writers else 0

    def close(self) -> None:
        """Write what is still to be written, if the files take it."""
        patience = _CLOSE_TIMEOUT
        while self._writers:
            _, writer = self._writers.popitem()
            if not writer.close(patience):
                patience = 0.0

    def _get_writer(self, name: str) -> LineWriter:
        if name not in self._writers:
            file = RotatingFile(self.get_path(name), self._max_bytes, self._max_backups, anew=True)
            self._writers[name] = LineWriter(file, log.format_drop_notice, name=name)
        return self._writers[name]
