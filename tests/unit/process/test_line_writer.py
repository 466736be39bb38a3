"""A writer of lines in front of a sink that blocks, fails, tears lines, or is well."""

import contextlib
import errno
import gc
import os
import threading

import pytest

from baton.process.line_writer import MAX_LINE_BYTES, Descriptor, LineWriter

_SOON = 60.0  # seconds, on any machine


class Disk:
    """A sink with `room` for so many bytes; without any it fails, and while `stuck` it blocks."""

    def __init__(self) -> None:
        self.taken = b""
        self.room: int | None = None
        self.stuck = threading.Event()  # set: it blocks
        self.blocks = threading.Event()  # set: it does so now
        self.goes_on = threading.Event()

    def write(self, data: memoryview) -> int:
        if self.stuck.is_set():
            self.blocks.set()
            assert self.goes_on.wait(_SOON)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "no space")
        length = len(data) if self.room is None else min(self.room, len(data))
        self.taken += bytes(data[:length])
        if self.room is not None:
            self.room -= length
        return length

    @property
    def lines(self) -> list[str]:
        return self.taken.decode().splitlines()


def writer(disk: Disk, max_lines: int = 100) -> LineWriter:
    return LineWriter(disk, lambda count: f"dropped {count}", max_lines=max_lines)


def test_lines_come_in_order_and_whole() -> None:
    disk = Disk()
    lines = writer(disk)
    for number in range(50):
        lines.write(f"line {number}")
    lines.write("two\nlines")
    assert lines.flush(_SOON)
    assert disk.lines == [*(f"line {number}" for number in range(50)), "two\\nlines"]
    assert lines.dropped == 0


def test_a_sink_that_blocks_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    disk = Disk()
    lines = writer(disk, max_lines=10)
    disk.stuck.set()
    lines.write("first")
    assert disk.blocks.wait(_SOON)
    for number in range(25):
        lines.write(f"line {number}")  # comes back at once: the test would not end otherwise
    assert not lines.flush(0.01)
    assert lines.dropped == 15
    disk.stuck.clear()
    disk.goes_on.set()
    assert lines.flush(_SOON)
    lines.write("last")
    assert lines.flush(_SOON)
    kept = [line for line in disk.lines if not line.startswith("dropped")]
    assert kept == ["first", *(f"line {number}" for number in range(10)), "last"]
    assert [line for line in disk.lines if line.startswith("dropped")] == [f"dropped {lines.dropped}"]


def test_a_sink_that_fails_is_tried_again_and_the_count_is_told_once() -> None:
    disk = Disk()
    lines = writer(disk)
    disk.room = 0
    for _ in range(3):
        lines.write("lost")
        assert lines.flush(_SOON)
    assert (lines.dropped, disk.taken) == (3, b"")
    disk.room = None
    for _ in range(2):
        lines.write("here")
        assert lines.flush(_SOON)
    assert disk.lines == ["dropped 3", "here", "here"]


def test_a_line_that_was_torn_does_not_spoil_the_next() -> None:
    disk = Disk()
    lines = writer(disk)
    disk.room = 10
    for word in ("whole", "torn apart", "lost"):
        lines.write(word)
    assert lines.flush(_SOON)
    assert disk.lines == ["whole", "torn"]
    assert lines.dropped == 2
    disk.room = None
    lines.write("next")
    assert lines.flush(_SOON)
    assert disk.lines == ["whole", "torn", "dropped 2", "next"]


def test_what_is_no_line_is_none_of_the_callers_business() -> None:
    disk = Disk()
    lines = writer(disk)
    lines.write("\ud800")  # no UTF-8
    lines.write("x" * (2 * MAX_LINE_BYTES))
    assert lines.flush(_SOON)
    assert disk.lines[0] == "\\ud800"
    assert len(disk.lines[1]) == MAX_LINE_BYTES + 3
    lines.write(None)  # type: ignore[arg-type]
    assert lines.dropped == 1


def test_a_finalizer_may_log_while_a_line_is_written() -> None:
    disk = Disk()
    lines = writer(disk)

    class Logs:
        def __del__(self) -> None:
            lines.write("from a finalizer")

    with lines._lock:  # as `_drop` and `_start` hold it when the garbage collector comes
        one = Logs()
        one.itself = one  # type: ignore[attr-defined]
        del one
        gc.collect()
        lines.write("after")
    assert lines.flush(_SOON)
    assert disk.lines == ["from a finalizer", "after"]


def test_a_forked_child_writes_its_own_lines() -> None:
    reader, sender = os.pipe()
    lines = LineWriter(Descriptor(sender), str)
    lines.write("parent")
    assert lines.flush(_SOON)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            lines.write("child")
            lines.flush(_SOON)
        os._exit(0)
    os.waitpid(child, 0)
    lines.write("parent again")
    assert lines.flush(_SOON)
    assert os.read(reader, 1000) == b"parent\nchild\nparent again\n"
    for descriptor in (reader, sender):
        os.close(descriptor)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads(blocking: bool) -> None:
    reader, sender = os.pipe()
    os.set_blocking(sender, blocking)
    lines = LineWriter(Descriptor(sender), lambda count: f"dropped {count}", max_lines=100)
    for number in range(3000):
        lines.write(f"line {number:90}")
    lines.flush(0.0)
    assert lines.dropped > 0
    with os.fdopen(reader, "rb") as pipe:
        end = threading.Thread(target=lambda: (lines.flush(_SOON), lines.write("end"), lines.close(_SOON)))
        end.start()
        read = iter(pipe.readline, b"end\n")
        told = [line for line in read if line.startswith(b"dropped")]
        end.join(_SOON)
    assert sum(int(line.split()[1]) for line in told) == lines.dropped
    os.close(sender)


def test_a_reader_that_is_gone() -> None:
    reader, sender = os.pipe()
    os.close(reader)
    lines = LineWriter(Descriptor(sender), str)
    lines.write("to nobody")
    assert lines.flush(_SOON)
    assert lines.dropped == 1
    os.close(sender)
