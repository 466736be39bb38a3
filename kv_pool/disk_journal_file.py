"""The journal beside the disk's file: what kv_pool/core/disk_journal.py says, appended, and compacted when more than
half of it is out of date. Belongs to one thread."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from kv_pool.core.disk_journal import Entry, check_of, read, record_bytes, seal
from kv_pool.disk_file import DiskFile, open_own, write_all

NAME = "pool-disk.journal"
_SLACK = 1024  # records beyond two for each slot
_READ = 1 << 20  # bytes at a time


class DiskJournal:
    """Of `file`. All of it raises OSError when the disk fails."""

    def __init__(self, folder: Path, file: DiskFile, block_size: int) -> None:
        self._path = folder / NAME
        self._block_size = block_size
        self._record = record_bytes(block_size)
        self._generation = file.generation
        self._most = 2 * file.slots + _SLACK
        self._last = array("q", [-1]) * file.slots  # by slot: its last record
        self._count = 0
        self._check = file.generation
        self._fd = open_own(self._path, os.O_CREAT)
        if file.fresh or os.fstat(self._fd).st_mode & 0o077:  # anybody may have written what it says
            os.ftruncate(self._fd, 0)
        os.fchmod(self._fd, 0o600)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._count * self._record

    def entries(self) -> Iterator[Entry]:
        """What was written in earlier lives, to its end; once, before anything is appended. What follows the last
        record that verifies is cut off."""
        for entry, check in read(self._records(self._most), self._block_size, self._generation):
            self._add(entry.slot, check)
            yield entry
        os.ftruncate(self._fd, self.size)

    def append(self, entry: Entry) -> None:
        """The slot has been written."""
        if self._count >= self._most:
            self._compact()
        record = seal(entry, self._check)
        write_all(self._fd, record, self.size)
        self._add(entry.slot, check_of(record))

    def close(self) -> None:
        os.close(self._fd)

    def _add(self, slot: int, check: int) -> None:
        if slot < len(self._last):
            self._last[slot] = self._count
        self._count += 1
        self._check = check

    def _records(self, most: int) -> Iterator[bytes]:
        at_once = max(1, _READ // self._record) * self._record
        for start in range(0, most * self._record, at_once):
            read_now = os.pread(self._fd, at_once, start)
            yield from (read_now[at : at + self._record] for at in range(0, len(read_now), self._record))
            if len(read_now) < at_once:
                return

    def _compact(self) -> None:
        """Write what is up to date to another file, which takes this one's place in one step."""
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)
        fresh = open_own(path, os.O_CREAT | os.O_EXCL)
        last, count, check = array("q", [-1]) * len(self._last), 0, self._generation
        try:
            for number, (entry, _) in enumerate(read(self._records(self._count), self._block_size, self._generation)):
                if entry.slot < len(last) and self._last[entry.slot] == number:
                    record = seal(entry, check)
                    write_all(fresh, record, count * self._record)
                    last[entry.slot], count, check = count, count + 1, check_of(record)
            os.replace(path, self._path)
        except BaseException:
            os.close(fresh)
            raise
        os.close(self._fd)
        self._fd, self._last, self._count, self._check = fresh, last, count, check
