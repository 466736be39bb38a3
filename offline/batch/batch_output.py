"""The output of a batch: answers are appended line by line, so that a killed batch can go on."""

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from baton.errors import BatonError, ConfigError
from offline.batch.batch_lines import AnswerKey, decode_answer_key


class OutputFailed(BatonError):
    """An answer could not be written."""

    code = "output_failed"


class BatchOutput:
    """Appends to a file that no other process appends to meanwhile."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises ConfigError."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            self._complete_bytes = self._lock_file()
            _sync_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced_bytes = self._complete_bytes  # that the disk has, and all of earlier runs
        self._is_torn = False  # the file ends with a part of a line
        self._sync_lock = threading.Lock()
        self._sync_failure: OutputFailed | None = None  # with lines that are not cut yet

    def read_answers(self) -> Iterator[tuple[int, AnswerKey]]:
        """Yield the number and the key of each line. A last line that is torn is removed.

        Raises ConfigError for a line that is no answer, and OutputFailed.
        """
        complete_bytes = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    yield number, decode_answer_key(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raise ConfigError(
                        f"{self._path} line {number} is no answer of a batch: give another file for"
                        " the output, or remove the line"
                    ) from None
                complete_bytes += len(line)
        self._complete_bytes = self._synced_bytes = complete_bytes
        self._cut_torn_line()
        self.sync()  # an earlier run may have been killed before it did

    def append(self, line: bytes) -> None:
        """Write a line as a whole or not at all. Raises OutputFailed."""
        if self._is_torn:  # it could not be cut before
            self._cut_torn_line()
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self._cut_torn_line()
            raise OutputFailed(
                f"{self._path} cannot be written ({error.strerror}): make room and run the same"
                " command again, which goes on where this one ends"
            ) from None
        self._complete_bytes += len(line)

    def sync(self) -> None:
        """Bring the lines to the disk. May be called on any thread. Raises OutputFailed."""
        with self._sync_lock:  # a call that nobody waits for any more may be running
            if self._sync_failure is not None:
                raise self._sync_failure
            complete_bytes = self._complete_bytes
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._sync_failure = OutputFailed(
                    f"{self._path} cannot be brought to the disk ({error.strerror}): when that is"
                    " mended, run the same command again, which goes on where this one ends"
                )
                raise self._sync_failure from None
            self._synced_bytes = complete_bytes

    def cut_unsynced_lines(self) -> None:
        """Remove lines of this run that the disk may lack, after `sync` has failed.

        The kernel reports such a failure once, and then takes them for written. Raises
        OutputFailed.
        """
        self._complete_bytes = self._synced_bytes
        self._cut_torn_line()
        self._sync_failure = None

    def close(self) -> None:
        """Flush the answers to disk (fsync) and close the file. Raises OutputFailed."""
        try:
            try:
                self.sync()
            except OutputFailed:
                self.cut_unsynced_lines()
                raise
        finally:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock_file(self) -> int:
        """Lock the file against other processes; returns its size in bytes."""
        state = os.fstat(self._fd)
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"{self._path} is not a file, and it is read at the next start")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run-batch") from None
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be locked: {error.strerror}") from None
        return os.fstat(self._fd).st_size

    def _cut_torn_line(self) -> None:
        self._is_torn = True
        try:
            os.ftruncate(self._fd, self._complete_bytes)
        except OSError as error:  # the next start removes it
            raise OutputFailed(f"{self._path} cannot be cut: {error.strerror}") from None
        self._is_torn = False


def _sync_folder(path: Path) -> None:
    """Bring the entry of a new file to the disk, where the file system can."""
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
