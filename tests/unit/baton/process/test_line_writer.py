"""A writer of lines in front of a sink that blocks, fails, tears lines, or is well."""

import contextlib
import errno
import gc
import os
import threading

import pytest

from baton.process.line_writer import MAX_LINE_BYTES, DescriptorSink, LineWriter

_SOON = 60.0  # seconds, on any machine


class FakeSink:
    """A sink with `room_bytes` for so many bytes; without any it fails, and while `must_block` it
    blocks."""

    def __init__(self) -> None:
        self.received = b""
        self.room_bytes: int | None = None
        self.must_block = threading.Event()  # set: it blocks
        self.is_blocking = threading.Event()  # set: it does so now
        self.unblocked = threading.Event()

    def write(self, data: memoryview) -> int:
        if self.must_block.is_set():
            self.is_blocking.set()
            assert self.unblocked.wait(_SOON)
        if self.room_bytes == 0:
            raise OSError(errno.ENOSPC, "no space")
        length = len(data) if self.room_bytes is None else min(self.room_bytes, len(data))
        self.received += bytes(data[:length])
        if self.room_bytes is not None:
            self.room_bytes -= length
        return length

    @property
    def lines(self) -> list[str]:
        return self.received.decode().splitlines()


def writer(disk: FakeSink, max_lines: int = 100) -> LineWriter:
    return LineWriter(disk, lambda count: f"dropped {count}", max_lines=max_lines)


def test_lines_come_in_order_and_whole() -> None:
    disk = FakeSink()
    lines = writer(disk)
    for number in range(50):
        lines.write(f"line {number}")
    lines.write("two\nlines")
    assert lines.flush(_SOON)
    assert disk.lines == [*(f"line {number}" for number in range(50)), "two\\nlines"]
    assert lines.dropped_lines == 0


def test_blocked_sink_never_blocks_writers_and_drops_are_counted() -> None:
    disk = FakeSink()
    lines = writer(disk, max_lines=10)
    disk.must_block.set()
    lines.write("first")
    assert disk.is_blocking.wait(_SOON)
    for number in range(25):
        lines.write(f"line {number}")  # comes back at once: the test would not end otherwise
    assert not lines.flush(0.01)
    assert lines.dropped_lines == 15
    disk.must_block.clear()
    disk.unblocked.set()
    assert lines.flush(_SOON)
    lines.write("last")
    assert lines.flush(_SOON)
    kept = [line for line in disk.lines if not line.startswith("dropped")]
    assert kept == ["first", *(f"line {number}" for number in range(10)), "last"]
    assert [line for line in disk.lines if line.startswith("dropped")] == [
        f"dropped {lines.dropped_lines}"
    ]


def test_failing_sink_is_retried_and_drops_reported_once() -> None:
    disk = FakeSink()
    lines = writer(disk)
    disk.room_bytes = 0
    for _ in range(3):
        lines.write("lost")
        assert lines.flush(_SOON)
    assert (lines.dropped_lines, disk.received) == (3, b"")
    disk.room_bytes = None
    for _ in range(2):
        lines.write("here")
        assert lines.flush(_SOON)
    assert disk.lines == ["dropped 3", "here", "here"]


def test_a_line_that_was_torn_does_not_spoil_the_next() -> None:
    disk = FakeSink()
    lines = writer(disk)
    disk.room_bytes = 10
    for word in ("whole", "torn apart", "lost"):
        lines.write(word)
    assert lines.flush(_SOON)
    assert disk.lines == ["whole", "torn"]
    assert lines.dropped_lines == 2
    disk.room_bytes = None
    lines.write("next")
    assert lines.flush(_SOON)
    assert disk.lines == ["whole", "torn", "dropped 2", "next"]


def test_invalid_lines_never_raise() -> None:
    disk = FakeSink()
    lines = writer(disk)
    lines.write("\ud800")  # no UTF-8
    lines.write("x" * (2 * MAX_LINE_BYTES))
    assert lines.flush(_SOON)
    assert disk.lines[0] == "\\ud800"
    assert len(disk.lines[1]) == MAX_LINE_BYTES + 3
    lines.write(None)  # type: ignore[arg-type]
    assert lines.dropped_lines == 1


def test_a_finalizer_may_log_while_a_line_is_written() -> None:
    disk = FakeSink()
    lines = writer(disk)

    class Logs:
        def __del__(self) -> None:
            lines.write("from a finalizer")

    with lines._lock:  # as `_drop` and `_start` hold it when the garbage collector comes
        logs = Logs()
        logs.itself = logs  # type: ignore[attr-defined]
        del logs
        gc.collect()
        lines.write("after")
    assert lines.flush(_SOON)
    assert disk.lines == ["from a finalizer", "after"]


def test_a_forked_child_writes_its_own_lines() -> None:
    reader, sender = os.pipe()
    lines = LineWriter(DescriptorSink(sender), str)
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
    lines = LineWriter(DescriptorSink(sender), lambda count: f"dropped {count}", max_lines=100)
    for number in range(3000):
        lines.write(f"line {number:90}")
    lines.flush(0.0)
    assert lines.dropped_lines > 0
    with os.fdopen(reader, "rb") as pipe:

        def write_end() -> None:
            lines.flush(_SOON)
            lines.write("end")
            lines.close(_SOON)

        end = threading.Thread(target=write_end)
        end.start()
        read = iter(pipe.readline, b"end\n")
        notices = [line for line in read if line.startswith(b"dropped")]
        end.join(_SOON)
    assert sum(int(line.split()[1]) for line in notices) == lines.dropped_lines
    os.close(sender)


def test_a_reader_that_is_gone() -> None:
    reader, sender = os.pipe()
    os.close(reader)
    lines = LineWriter(DescriptorSink(sender), str)
    lines.write("to nobody")
    assert lines.flush(_SOON)
    assert lines.dropped_lines == 1
    os.close(sender)
