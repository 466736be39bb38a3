"""Log files of processes that a test starts itself, without a supervisor between."""

import os
from pathlib import Path

_TAIL_BYTES = 1 << 16  # bytes
_TAIL_LINES = 20  # lines


class ChildLogs:
    """One file per process in `folder`, begun anew. The processes write themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def open_log(self, name: str) -> int:
        """What the process gets as standard output and error."""
        if name not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._descriptors[name] = os.open(self.log_path(name), flags, 0o600)
        return self._descriptors[name]

    def redirect_output(self, name: str, descriptor: int) -> None:
        """From now on a process of this name is started with this descriptor instead of a file. It
        is ours to close."""
        self._descriptors[name] = descriptor

    def last_lines(self, name: str) -> list[str]:
        if not self.log_path(name).exists():  # redirected
            return []
        with self.log_path(name).open("rb") as file:
            file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
