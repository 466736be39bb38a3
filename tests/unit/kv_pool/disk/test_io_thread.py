"""The thread that waits for the disk, over a file and a journal that do as they are told."""

import threading
from typing import cast

import pytest

from baton.process.clock import monotonic_clock
from kv_pool.common.block_rows import BlockRows
from kv_pool.core.disk.journal_records import JournalEntry
from kv_pool.disk.data_file import DiskFile
from kv_pool.disk.io_thread import DiskIOThread
from kv_pool.disk.journal_file import DiskJournalFile

BLOCK = 64


class FakeDiskFile:
    """File and journal. It writes once it may."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.write_started = threading.Event()
        self.error: Exception | None = None
        self.slots: dict[int, bytes] = {}
        self.journaled_slots: list[int] = []
        self.num_closed = 0

    def write_slot(self, slot: int, block: memoryview) -> None:
        self.write_started.set()
        self.may_write.wait()
        self.slots[slot] = bytes(block)

    def read_slot(self, slot: int, into: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        into[:] = self.slots[slot]
        return True

    def append_entry(self, entry: JournalEntry) -> None:
        self.journaled_slots.append(entry.slot)

    def close(self) -> None:
        self.num_closed += 1


class DiskIORig:
    def __init__(self) -> None:
        self.disk, self.failures = FakeDiskFile(), list[OSError]()
        self.memory = BlockRows(memoryview(bytearray(4 * BLOCK)), BLOCK)
        file, journal = cast(DiskFile, self.disk), cast(DiskJournalFile, self.disk)
        self.thread = DiskIOThread(
            file, journal, self.memory, BLOCK, monotonic_clock, self.failures.append
        )

    def queue_write(self, slot: int) -> int:
        """The checksum."""
        row = self.thread.reserve_row(slot)
        self.thread.staging.row(row)[:] = bytes([slot + 1]) * BLOCK
        self.thread.queue_write(JournalEntry(slot, 0, 0, b"", b"", b""), row)
        return self.thread.staging.checksum(row)


def test_cancelled_read_does_not_block_writes() -> None:
    scene = DiskIORig()
    scene.queue_write(0)
    scene.disk.write_started.wait()
    unwanted = scene.thread.queue_read([0], [0], [0])
    scene.queue_write(1)
    assert unwanted.cancel()
    scene.disk.may_write.set()
    scene.thread.close()
    assert sorted(scene.disk.journaled_slots) == [0, 1]
    assert scene.disk.num_closed == 2
    assert bytes(scene.memory.row(0)) == bytes(BLOCK), (
        "nobody waits for that place to be left alone"
    )


@pytest.mark.parametrize("error", [OSError(5, "it is broken"), ValueError("a defect")])
def test_failed_disk_answers_every_read(error: Exception) -> None:
    scene = DiskIORig()
    scene.disk.may_write.set()
    checksum = scene.queue_write(0)
    assert scene.thread.queue_read([0], [checksum], [1]).result(30).intact_blocks == 1
    scene.disk.error = error
    assert scene.thread.queue_read([0], [checksum], [1]).result(30).intact_blocks == 0
    scene.disk.error = None
    assert scene.thread.queue_read([0], [checksum], [1]).result(30).intact_blocks == 0, (
        "it is used no more"
    )
    scene.thread.close()
    assert len(scene.failures) == 1
    assert scene.disk.num_closed == 2
