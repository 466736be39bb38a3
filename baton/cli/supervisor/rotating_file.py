"""A log file of bounded size."""

import contextlib
import itertools
import os
from pathlib import Path


class RotatingFile:
    """A sink of a LineWriter that rotates its file at `max_bytes`.

    FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on up to FILE.`backups`. After any failure
    the next write continues from there: writing resumes once the disk has room, and no backup is
    lost.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        backups: int,
        *,
        descriptor: int | None = None,
        anew: bool = False,
    ) -> None:
        """Open nothing yet; the first write opens the file.

        `descriptor` is redirected to the current file for code that writes to it directly. `anew`
        truncates the existing file.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._max_backups = backups
        self._descriptor = descriptor
        self._open_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0)
        self._file: int | None = None

    def write(self, data: memoryview) -> int:
        """Write to the file, after a rotation if it is full. Raises OSError."""
        if self._file is None:
            self._open()
        assert self._file is not None
        if os.fstat(self._file).st_size >= self._max_bytes:
            self._rotate()
        return os.write(self._file, data)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        opened = os.open(self._path, self._open_flags, 0o600)
        self._open_flags &= ~os.O_TRUNC
        if self._descriptor is not None:
            os.dup2(opened, self._descriptor)
        self.close()
        self._file = opened

    def _rotate(self) -> None:
        """Move the full file away, once, and open a new one.

        If the new file cannot be opened, the full one has been moved already: the next try must not
        move the backups again, which would lose one.
        """
        if self._is_current():
            self._shift_backups()
        self._open()

    def _is_current(self) -> bool:
        """Return whether the open file is still the one at the path."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _shift_backups(self) -> None:
        names = [
            self._path,
            *(Path(f"{self._path}.{number}") for number in range(1, self._max_backups + 1)),
        ]
        names[-1].unlink(missing_ok=True)
        for old, new in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                old.rename(new)
