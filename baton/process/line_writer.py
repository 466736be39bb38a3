"""Writes lines on a separate thread, so that a sink that blocks or fails delays no caller.

A caller never waits and never gets an error. Lines that the sink does not accept are dropped and
counted. Before the next line that it accepts, the writer writes one with the number of lost lines.
"""

import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

MAX_LINES = 4096  # lines that may be queued
MAX_LINE_BYTES = 16 << 10  # a longer line is truncated
_BATCH_LINES = 256
# The first line of a batch waits this long for others, so that one write carries all of them.
_BATCH_DELAY_SECONDS = 0.005

_writers: "weakref.WeakSet[LineWriter]" = weakref.WeakSet()


class LineSink(Protocol):
    """Where a LineWriter writes. Called on the writer's thread only."""

    def write(self, data: memoryview) -> int:
        """Write at least the first byte of `data`. Returns how many bytes were written.

        May block. Raises OSError.
        """
        ...


class DescriptorSink:
    """Writes to an open file descriptor. Waits for a non-blocking one that is full."""

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: memoryview) -> int:
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._number, select.POLLOUT)
                poll.poll()


class LineWriter:
    """Queues lines for a sink and writes them on a thread.

    Any thread may call `write`, also in a finalizer. The writer's thread starts with the first
    line, and again after a fork. It is a daemon thread: a process can end while its sink blocks.
    """

    def __init__(
        self,
        sink: LineSink,
        describe_drops: Callable[[int], str],
        *,
        name: str = "log",
        max_lines: int = MAX_LINES,
    ) -> None:
        """`describe_drops` formats the line that says how many lines were dropped."""
        self._sink = sink
        self._describe_drops = describe_drops
        self._name = name
        self._max_lines = max_lines
        self._dropped_lines = 0
        self._reported_drops = 0  # dropped lines that a notice was written for
        self._is_line_torn = False  # the sink accepted only the beginning of the last line
        self._reset_thread()
        _writers.add(self)

    @property
    def dropped_lines(self) -> int:
        """Number of lines that were not written."""
        return self._dropped_lines

    def write(self, line: str) -> None:
        """Queue a line, without its newline. Never blocks and never raises."""
        try:
            if self._lines.qsize() >= self._max_lines:
                self._count_dropped(1)
                return
            if self._thread is None:
                self._start()
            self._lines.put(_encode_line(line))
        except Exception:  # no thread can be started, no memory
            self._count_dropped(1)

    def flush(self, timeout: float) -> bool:
        """Wait until the queued lines are written or dropped. False after `timeout` seconds."""
        if self._thread is None:
            return True
        reached = threading.Event()
        self._lines.put(reached)
        return reached.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Flush and end the thread. Returns False if the sink blocks; the thread then stays."""
        flushed = self.flush(timeout)
        self._lines.put(None)
        return flushed

    def _reset_thread(self) -> None:
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = (
            queue.SimpleQueue()
        )  # put() is reentrant
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # reentrant: a finalizer may log on this thread

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"{self._name}-writer", daemon=True
                )
                self._thread.start()

    def _count_dropped(self, lines: int) -> None:
        with self._lock:
            self._dropped_lines += lines

    def _run(self) -> None:
        ended = False
        while not ended:
            items = [self._lines.get()]
            if isinstance(items[0], bytes):
                time.sleep(_BATCH_DELAY_SECONDS)
            while len(items) < _BATCH_LINES:
                try:
                    items.append(self._lines.get_nowait())
                except queue.Empty:
                    break
            self._write_batch([item for item in items if isinstance(item, bytes)])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            ended = None in items

    def _write_batch(self, lines: list[bytes]) -> None:
        missing = self._dropped_lines - self._reported_drops
        if not lines:
            return
        notice = [_encode_line(self._describe_drops(missing))] if missing else []
        line_end = b"\n" if self._is_line_torn else b""
        data = memoryview(line_end + b"".join([*notice, *lines]))
        sent = self._write_to_sink(data)
        complete_lines = bytes(data[len(line_end) : sent]).count(b"\n")
        if notice and complete_lines:
            self._reported_drops += missing
        self._count_dropped(len(lines) - max(0, complete_lines - len(notice)))
        if sent:
            self._is_line_torn = data[sent - 1] != ord("\n")

    def _write_to_sink(self, data: memoryview) -> int:
        """Write as much as the sink accepts. Returns how many bytes."""
        sent = 0
        try:
            while sent < len(data):
                sent += self._sink.write(data[sent:])
        except Exception:  # most likely OSError: the disk is full, the reader is gone
            return sent
        return sent


def _encode_line(line: str) -> bytes:
    data = line.encode(errors="backslashreplace").replace(b"\n", b"\\n")
    if len(data) > MAX_LINE_BYTES:
        data = data[:MAX_LINE_BYTES] + b"..."
    return data + b"\n"


def _reset_after_fork() -> None:
    """Start with an empty queue in the child of a fork: the parent's thread writes the old one."""
    for writer in _writers:
        writer._reset_thread()


os.register_at_fork(after_in_child=_reset_after_fork)
