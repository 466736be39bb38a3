"""Log files of processes that a test starts itself, without a supervisor between."""

import os
from pathlib import Path

_SHOWN = 1 << 16  # bytes
_REMEMBERED = 20  # lines


class ChildLogs:
    """One file per process in `folder`, begun anew. The processes write themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def target(self, name: str) -> int:
        """What the process gets as standard output and error."""
        if name not in self._open:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._open[name] = os.open(self.path(name), flags, 0o600)
        return self._open[name]

    def redirect(self, name: str, descriptor: int) -> None:
        """From now on a process of this name is started with this descriptor instead of a file. It is ours to close."""
        self._open[name] = descriptor

    def last_words(self, name: str) -> list[str]:
        if not self.path(name).exists():  # redirected
            return []
        with self.path(name).open("rb") as file:
            file.seek(-min(_SHOWN, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode(errors="replace").splitlines()[-_REMEMBERED:]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
