"""The I/O thread of the pool's disk, the only one that waits for it. Reads go before writes.

Blocks to write have been copied to staging rows before, so that their memory can be reused. The
number of rows is fixed, so a slow disk takes a bounded amount of memory.
"""

import errno
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.errors import BatonError
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS, FailpointAction
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.disk.journal_records import JournalEntry
from kv_pool.disk.data_file import DiskFile
from kv_pool.disk.journal_file import DiskJournalFile

_STAGING_BYTES = 64 << 20
_MAX_STAGING_ROWS = 1024
_CLOSE_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class DiskReadResult:
    """The outcome of one read."""

    intact_blocks: int  # blocks that matched their checksums, up to the first mismatch
    wait_seconds: float  # in the queue
    read_seconds: float  # on the disk


@dataclass(frozen=True, slots=True)
class _WriteJob:
    entry: JournalEntry
    row: int


@dataclass(frozen=True, slots=True)
class _ReadJob:
    slots: Sequence[int]
    checksums: Sequence[int]
    memory_blocks: Sequence[int]
    queued_at: float
    result: "Future[DiskReadResult]"


class DiskIOThread:
    """Reads slots into the rows of `memory` and writes staging rows to slots.

    `on_failed` is called on this thread, once, when the disk fails; from then on nothing is read or
    written.
    """

    def __init__(
        self,
        file: DiskFile,
        journal: DiskJournalFile,
        memory: BlockRows,
        block_bytes: int,
        clock: Clock,
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._file, self._journal, self._memory = file, journal, memory
        rows = max(1, min(_MAX_STAGING_ROWS, _STAGING_BYTES // block_bytes))
        self.staging = BlockRows(memoryview(mmap.mmap(-1, rows * block_bytes)), block_bytes)
        self._free_rows = deque(range(rows))
        self._clock = clock
        self._on_failed = on_failed
        self._changed = threading.Condition()
        self._writes: deque[_WriteJob] = deque()
        self._reads: deque[_ReadJob] = deque()
        self._writes_by_slot: Counter[int] = Counter()  # number of queued writes
        self._closing = self._has_failed = False
        self.written_blocks = 0
        self._thread = threading.Thread(target=self._run, name="pool-disk", daemon=True)
        self._thread.start()

    # any thread

    @property
    def num_free_rows(self) -> int:
        """Staging rows that are free."""
        return len(self._free_rows)

    @property
    def unwritten_slots(self) -> set[int]:
        """Slots with a write that has not finished."""
        with self._changed:
            return set(self._writes_by_slot)

    def reserve_row(self, slot: int) -> int:
        """Take a free row of `staging`, which `queue_write` later writes to `slot`."""
        with self._changed:
            self._writes_by_slot[slot] += 1
        return self._free_rows.popleft()

    def queue_write(self, entry: JournalEntry, row: int) -> None:
        """Queue the write of a staging row to its slot and journal; the row is free afterwards."""
        with self._changed:
            self._writes.append(_WriteJob(entry, row))
            self._changed.notify()

    def queue_read(
        self, slots: Sequence[int], checksums: Sequence[int], memory_blocks: Sequence[int]
    ) -> "Future[DiskReadResult]":
        """Queue a read of slots into blocks of memory, up to the first that fails its checksum.

        Writes of these slots that were queued before are done first.
        """
        job = _ReadJob(slots, checksums, memory_blocks, self._clock(), Future())
        with self._changed:
            self._reads.append(job)
            self._changed.notify()
        return job.result

    def close(self) -> None:
        """Stop when everything is written, or the disk takes too long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_SECONDS)
        if not self._thread.is_alive():
            self._file.close()
            self._journal.close()

    # this thread

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                if isinstance(job, _WriteJob):
                    self._run_write(job)
                else:
                    self._run_read(job)
            except OSError as error:
                self._fail(error)
            except Exception as error:  # a bug disables the disk; no reader waits for ever
                log.get_logger("pool").error(
                    "disk i/o thread failed",
                    error_type=type(error).__name__,
                    traceback=log.get_traceback_frames(error),
                )
                self._fail(OSError(errno.EIO, f"{type(error).__name__} in the disk thread"))

    def _next_job(self) -> _WriteJob | _ReadJob | None:
        with self._changed:
            while True:
                if self._reads and not any(
                    slot in self._writes_by_slot for slot in self._reads[0].slots
                ):
                    return self._reads.popleft()
                if self._writes:
                    return self._writes.popleft()
                if self._closing and not self._reads:
                    return None
                self._changed.wait()

    def _run_write(self, job: _WriteJob) -> None:
        try:
            if not self._has_failed:
                if _hit_disk_failpoint("pool.disk.write") is FailpointAction.CORRUPT:
                    self.staging.flip_bit(job.row)
                self._file.write_slot(job.entry.slot, self.staging.row(job.row))
                self._journal.append_entry(job.entry)
                self.written_blocks += 1
        finally:
            with self._changed:
                self._writes_by_slot[job.entry.slot] -= 1
                if not self._writes_by_slot[job.entry.slot]:
                    del self._writes_by_slot[job.entry.slot]
            self._free_rows.append(job.row)

    def _run_read(self, job: _ReadJob) -> None:
        if not job.result.set_running_or_notify_cancel():
            return  # the reader has cancelled it
        started_at, num_intact = self._clock(), 0
        try:
            if not self._has_failed:
                num_intact = self._read_blocks(job)
        finally:
            wait_seconds, read_seconds = started_at - job.queued_at, self._clock() - started_at
            job.result.set_result(DiskReadResult(num_intact, wait_seconds, read_seconds))

    def _read_blocks(self, job: _ReadJob) -> int:
        """Read blocks up to the first that fails its checksum; returns how many were intact."""
        for number, (slot, block) in enumerate(zip(job.slots, job.memory_blocks, strict=True)):
            _hit_disk_failpoint("pool.disk.read")
            is_read = self._file.read_slot(slot, self._memory.row(block))
            if not is_read or self._memory.checksum(block) != job.checksums[number]:
                return number
        return len(job.memory_blocks)

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failed(error)


def _hit_disk_failpoint(name: str) -> FailpointAction | None:
    """Hit a failpoint; its error is raised as an OSError of the disk."""
    try:
        return FAILPOINTS.hit(name)
    except BatonError as error:
        raise OSError(errno.EIO, error.message) from None
