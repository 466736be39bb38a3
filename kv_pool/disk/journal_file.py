"""The journal beside the disk's file: what kv_pool/core/disk/journal_records.py says, appended, and
compacted when more than half of it is out of date. Belongs to one thread."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from kv_pool.core.disk.journal_records import (
    JournalEntry,
    decode_records,
    encode_record,
    record_checksum,
    record_size,
)
from kv_pool.disk.data_file import DiskFile, open_private_file, write_all

JOURNAL_FILE_NAME = "pool-disk.journal"
_SLACK_RECORDS = 1024  # records beyond two for each slot
_READ_BYTES = 1 << 20  # bytes at a time


class DiskJournalFile:
    """Of `file`. All of it raises OSError when the disk fails."""

    def __init__(self, folder: Path, file: DiskFile, block_size: int) -> None:
        self._path = folder / JOURNAL_FILE_NAME
        self._block_size = block_size
        self._record_size = record_size(block_size)
        self._generation = file.generation
        self._max_records = 2 * file.num_slots + _SLACK_RECORDS
        self._last_record = array("q", [-1]) * file.num_slots  # by slot: its last record
        self._num_records = 0
        self._last_checksum = file.generation
        self._fd = open_private_file(self._path, os.O_CREAT)
        if (
            file.is_new or os.fstat(self._fd).st_mode & 0o077
        ):  # anybody may have written what it says
            os.ftruncate(self._fd, 0)
        os.fchmod(self._fd, 0o600)

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return self._num_records * self._record_size

    def replay_entries(self) -> Iterator[JournalEntry]:
        """What was written in earlier lives, to its end; once, before anything is appended. What
        follows the last record that verifies is cut off."""
        for entry, check in decode_records(
            self._records(self._max_records), self._block_size, self._generation
        ):
            self._note_record(entry.slot, check)
            yield entry
        os.ftruncate(self._fd, self.size_bytes)

    def append_entry(self, entry: JournalEntry) -> None:
        """The slot has been written."""
        if self._num_records >= self._max_records:
            self._compact()
        record = encode_record(entry, self._last_checksum)
        write_all(self._fd, record, self.size_bytes)
        self._note_record(entry.slot, record_checksum(record))

    def close(self) -> None:
        os.close(self._fd)

    def _note_record(self, slot: int, check: int) -> None:
        if slot < len(self._last_record):
            self._last_record[slot] = self._num_records
        self._num_records += 1
        self._last_checksum = check

    def _records(self, most: int) -> Iterator[bytes]:
        at_once = max(1, _READ_BYTES // self._record_size) * self._record_size
        for start in range(0, most * self._record_size, at_once):
            read_now = os.pread(self._fd, at_once, start)
            yield from (
                read_now[at : at + self._record_size]
                for at in range(0, len(read_now), self._record_size)
            )
            if len(read_now) < at_once:
                return

    def _compact(self) -> None:
        """Write what is up to date to another file, which takes this one's place in one step."""
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)
        fresh = open_private_file(path, os.O_CREAT | os.O_EXCL)
        last, count, check = array("q", [-1]) * len(self._last_record), 0, self._generation
        try:
            for number, (entry, _) in enumerate(
                decode_records(self._records(self._num_records), self._block_size, self._generation)
            ):
                if entry.slot < len(last) and self._last_record[entry.slot] == number:
                    record = encode_record(entry, check)
                    write_all(fresh, record, count * self._record_size)
                    last[entry.slot], count, check = count, count + 1, record_checksum(record)
            os.replace(path, self._path)
        except BaseException:
            os.close(fresh)
            raise
        os.close(self._fd)
        self._fd, self._last_record, self._num_records, self._last_checksum = (
            fresh,
            last,
            count,
            check,
        )
