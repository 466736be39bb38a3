"""The journal file beside the disk's data file. Belongs to one thread.

Records (kv_pool/core/disk/journal_records.py) are appended. The journal is compacted when it has
more than two records per slot, so that more than half of them are out of date.
"""

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
_SLACK_RECORDS = 1024  # allowed on top of two for each slot
_READ_BYTES = 1 << 20  # per read


class DiskJournalFile:
    """The journal of a data file. Every method raises OSError when the disk fails."""

    def __init__(self, folder: Path, file: DiskFile, block_size: int) -> None:
        self._path = folder / JOURNAL_FILE_NAME
        self._block_size = block_size
        self._record_size = record_size(block_size)
        self._generation = file.generation
        self._max_records = 2 * file.num_slots + _SLACK_RECORDS
        self._last_record = array("q", [-1]) * file.num_slots  # number by slot
        self._num_records = 0
        self._last_checksum = file.generation
        self._fd = open_private_file(self._path, os.O_CREAT)
        is_private = not os.fstat(self._fd).st_mode & 0o077  # else any user may have written it
        if file.is_new or not is_private:
            os.ftruncate(self._fd, 0)
        os.fchmod(self._fd, 0o600)

    @property
    def size_bytes(self) -> int:
        """The size of the valid part of the journal."""
        return self._num_records * self._record_size

    def replay_entries(self) -> Iterator[JournalEntry]:
        """Yield the entries of earlier runs; call it once, before the first append.

        The journal is truncated after the last record that verifies.
        """
        for entry, check in decode_records(
            self._records(self._max_records), self._block_size, self._generation
        ):
            self._note_record(entry.slot, check)
            yield entry
        os.ftruncate(self._fd, self.size_bytes)

    def append_entry(self, entry: JournalEntry) -> None:
        """Record that a slot has been written."""
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

    def _records(self, max_records: int) -> Iterator[bytes]:
        """Yield the records of the file; the last one may be cut off."""
        chunk_bytes = max(1, _READ_BYTES // self._record_size) * self._record_size
        for start in range(0, max_records * self._record_size, chunk_bytes):
            chunk = os.pread(self._fd, chunk_bytes, start)
            yield from (
                chunk[at : at + self._record_size] for at in range(0, len(chunk), self._record_size)
            )
            if len(chunk) < chunk_bytes:
                return

    def _compact(self) -> None:
        """Write each slot's last record to a new file, and atomically replace the journal by it."""
        path = self._path.with_suffix(".new")
        path.unlink(missing_ok=True)
        new_file = open_private_file(path, os.O_CREAT | os.O_EXCL)
        last, count, check = array("q", [-1]) * len(self._last_record), 0, self._generation
        try:
            for number, (entry, _) in enumerate(
                decode_records(self._records(self._num_records), self._block_size, self._generation)
            ):
                if entry.slot < len(last) and self._last_record[entry.slot] == number:
                    record = encode_record(entry, check)
                    write_all(new_file, record, count * self._record_size)
                    last[entry.slot], count, check = count, count + 1, record_checksum(record)
            os.replace(path, self._path)
        except BaseException:
            os.close(new_file)
            raise
        os.close(self._fd)
        self._fd, self._last_record, self._num_records, self._last_checksum = (
            new_file,
            last,
            count,
            check,
        )
