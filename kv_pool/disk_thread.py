"""The one thread that waits for the disk. What it is to write has been copied out of the pool's memory before, to rows
of its own; there are only so many, so a disk that is behind costs memory of a known size. Reads go first."""

import errno
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton import log
from baton.clock import Clock
from baton.errors import BatonError
from baton.failpoints import FAILPOINTS, Action
from kv_pool.block_rows import BlockRows
from kv_pool.core.disk_journal import Entry
from kv_pool.disk_file import DiskFile
from kv_pool.disk_journal_file import DiskJournal

_STAGING = 64 << 20  # bytes
_MOST_ROWS = 1024
_LAST_WORDS = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class Fetched:
    """How many leading blocks were what their checksums say; seconds until it was their turn, and of reading."""

    whole: int
    waited: float
    took: float


@dataclass(frozen=True, slots=True)
class _Write:
    entry: Entry
    row: int


@dataclass(frozen=True, slots=True)
class _Read:
    slots: Sequence[int]
    checksums: Sequence[int]
    places: Sequence[int]
    since: float
    result: "Future[Fetched]"


class DiskThread:
    """Reads into the rows of `memory`. `failed` is called on this thread, once, when the disk fails: then nothing is
    read or written any more."""

    def __init__(
        self,
        file: DiskFile,
        journal: DiskJournal,
        memory: BlockRows,
        block_bytes: int,
        clock: Clock,
        failed: Callable[[OSError], None],
    ) -> None:
        self._file, self._journal, self._memory = file, journal, memory
        rows = max(1, min(_MOST_ROWS, _STAGING // block_bytes))
        self.staging = BlockRows(memoryview(mmap.mmap(-1, rows * block_bytes)), block_bytes)
        self._free_rows = deque(range(rows))
        self._clock = clock
        self._failed = failed
        self._changed = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._reads: deque[_Read] = deque()
        self._pending: Counter[int] = Counter()  # slots with writes to come
        self._closing = self._broken = False
        self.written = 0  # blocks
        self._thread = threading.Thread(target=self._run, name="pool-disk", daemon=True)
        self._thread.start()

    # any thread

    @property
    def room(self) -> int:
        """Rows that are free."""
        return len(self._free_rows)

    @property
    def writing(self) -> set[int]:
        """Slots that are not written yet."""
        with self._changed:
            return set(self._pending)

    def take_row(self, slot: int) -> int:
        """A free row of `staging`, for what `write` then brings to `slot`."""
        with self._changed:
            self._pending[slot] += 1
        return self._free_rows.popleft()

    def write(self, entry: Entry, row: int) -> None:
        """Bring a row to its slot and say so in the journal, some time; then the row is free."""
        with self._changed:
            self._writes.append(_Write(entry, row))
            self._changed.notify()

    def read(self, slots: Sequence[int], checksums: Sequence[int], places: Sequence[int]) -> "Future[Fetched]":
        """Bring slots to blocks of memory, up to the first that is not what its checksum says. What is to be written to
        them before is written before."""
        job = _Read(slots, checksums, places, self._clock(), Future())
        with self._changed:
            self._reads.append(job)
            self._changed.notify()
        return job.result

    def close(self) -> None:
        """When everything is written, or the disk takes too long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_LAST_WORDS)
        if not self._thread.is_alive():
            self._file.close()
            self._journal.close()

    # this thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, _Write):
                    self._write(job)
                else:
                    self._read(job)
            except OSError as error:
                self._break(error)
            except Exception as error:  # a defect costs the disk, not those who wait for this thread
                log.get("pool").error("the disk's thread failed", kind=type(error).__name__, places=log.places(error))
                self._break(OSError(errno.EIO, f"{type(error).__name__} in its thread"))

    def _next(self) -> _Write | _Read | None:
        with self._changed:
            while True:
                if self._reads and not any(slot in self._pending for slot in self._reads[0].slots):
                    return self._reads.popleft()
                if self._writes:
                    return self._writes.popleft()
                if self._closing and not self._reads:
                    return None
                self._changed.wait()

    def _write(self, job: _Write) -> None:
        try:
            if not self._broken:
                if _fault("pool.disk.write") is Action.CORRUPT:
                    self.staging.flip_bit(job.row)
                self._file.write(job.entry.slot, self.staging.row(job.row))
                self._journal.append(job.entry)
                self.written += 1
        finally:
            with self._changed:
                self._pending[job.entry.slot] -= 1
                if not self._pending[job.entry.slot]:
                    del self._pending[job.entry.slot]
            self._free_rows.append(job.row)

    def _read(self, job: _Read) -> None:
        if not job.result.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        began, whole = self._clock(), 0
        try:
            if not self._broken:
                whole = self._read_blocks(job)
        finally:
            ended = self._clock()
            job.result.set_result(Fetched(whole, began - job.since, ended - began))

    def _read_blocks(self, job: _Read) -> int:
        for number, (slot, place) in enumerate(zip(job.slots, job.places, strict=True)):
            _fault("pool.disk.read")
            whole = self._file.read(slot, self._memory.row(place))
            if not whole or self._memory.checksum(place) != job.checksums[number]:
                return number
        return len(job.places)

    def _break(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            self._failed(error)


def _fault(name: str) -> Action | None:
    """A failpoint's error is the disk's."""
    try:
        return FAILPOINTS.hit(name)
    except BatonError as error:
        raise OSError(errno.EIO, error.message) from None
