"""Where the lines of child processes go: to log files (detached), or through us to the terminal with their names."""

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from baton.errors import ConfigError

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16  # bytes; longer ones are broken
_REMEMBERED = 20  # lines
_ERROR = "error: "


class Output(Protocol):
    """The sink of all children of one supervisor."""

    def target(self, name: str) -> int:
        """What the child gets as standard output and error: a file descriptor, or subprocess.PIPE."""
        ...

    async def follow(self, name: str, stream: asyncio.StreamReader | None) -> None:
        """Carry the child's lines until its end; nothing to do when it writes by itself."""
        ...

    def last_words(self, name: str) -> list[str]:
        """The child's last lines."""
        ...


def complaint(lines: list[str]) -> str:
    """What a child that gave up said: its `error: ` line, else its last line."""
    for line in reversed(lines):
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    return lines[-1] if lines else "it said nothing"


class LogFiles:
    """One file per child in `folder`, begun anew by this supervisor. The child writes itself, so that a supervisor
    which is stopped holds nobody up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder of logs {folder}: {error.strerror}: choose another with --state-dir") from None

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def target(self, name: str) -> int:
        if name not in self._open:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._open[name] = os.open(self.path(name), flags, 0o600)
        return self._open[name]

    async def follow(self, name: str, stream: asyncio.StreamReader | None) -> None:
        return

    def last_words(self, name: str) -> list[str]:
        with self.path(name).open("rb") as file:
            file.seek(-min(_CHUNK, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode(errors="replace").splitlines()[-_REMEMBERED:]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class Relay:
    """Lines pass through `write(name, line)`, and the last few of each child are remembered. An `error: ` line is what
    a process of ours says last: the supervisor tells it, once, for all the children that may say the same."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._last: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def target(self, name: str) -> int:
        return asyncio.subprocess.PIPE

    async def follow(self, name: str, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        pending = b""
        while chunk := await stream.read(_CHUNK):
            *whole, pending = (pending + chunk).split(b"\n")
            if len(pending) > _LONGEST_LINE:
                whole, pending = [*whole, pending], b""
            for line in whole:
                self._line(name, line)
        if pending:
            self._line(name, pending)

    def last_words(self, name: str) -> list[str]:
        return list(self._last[name])

    def _line(self, name: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._last[name].append(text)
        if not text.startswith(_ERROR):
            self._write(name, text)
