"""The thread that waits for the disk, over a file and a journal that do as they are told."""

import threading
from typing import cast

import pytest

from baton.clock import steady
from kv_pool.block_rows import BlockRows
from kv_pool.core.disk_journal import Entry
from kv_pool.disk_file import DiskFile
from kv_pool.disk_journal_file import DiskJournal
from kv_pool.disk_thread import DiskThread

BLOCK = 64


class Disk:
    """File and journal. It writes once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.slots: dict[int, bytes] = {}
        self.said: list[int] = []
        self.closed = 0

    def write(self, slot: int, block: memoryview) -> None:
        self.begun.set()
        self.may.wait()
        self.slots[slot] = bytes(block)

    def read(self, slot: int, into: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        into[:] = self.slots[slot]
        return True

    def append(self, entry: Entry) -> None:
        self.said.append(entry.slot)

    def close(self) -> None:
        self.closed += 1


class Scene:
    def __init__(self) -> None:
        self.disk, self.failed = Disk(), list[OSError]()
        self.memory = BlockRows(memoryview(bytearray(4 * BLOCK)), BLOCK)
        file, journal = cast(DiskFile, self.disk), cast(DiskJournal, self.disk)
        self.thread = DiskThread(file, journal, self.memory, BLOCK, steady, self.failed.append)

    def write(self, slot: int) -> int:
        """The checksum."""
        row = self.thread.take_row(slot)
        self.thread.staging.row(row)[:] = bytes([slot + 1]) * BLOCK
        self.thread.write(Entry(slot, 0, 0, b"", b"", b""), row)
        return self.thread.staging.checksum(row)


def test_a_read_that_nobody_wants_any_more_costs_no_write() -> None:
    scene = Scene()
    scene.write(0)
    scene.disk.begun.wait()
    unwanted = scene.thread.read([0], [0], [0])
    scene.write(1)
    assert unwanted.cancel()
    scene.disk.may.set()
    scene.thread.close()
    assert sorted(scene.disk.said) == [0, 1]
    assert scene.disk.closed == 2
    assert bytes(scene.memory.row(0)) == bytes(BLOCK), "nobody waits for that place to be left alone"


@pytest.mark.parametrize("error", [OSError(5, "it is broken"), ValueError("a defect")])
def test_a_disk_that_fails_keeps_nobody_waiting(error: Exception) -> None:
    scene = Scene()
    scene.disk.may.set()
    checksum = scene.write(0)
    assert scene.thread.read([0], [checksum], [1]).result(30).whole == 1
    scene.disk.error = error
    assert scene.thread.read([0], [checksum], [1]).result(30).whole == 0
    scene.disk.error = None
    assert scene.thread.read([0], [checksum], [1]).result(30).whole == 0, "it is used no more"
    scene.thread.close()
    assert len(scene.failed) == 1
    assert scene.disk.closed == 2
