"""Processes of this machine: who listens on a port, who uses the CPUs, and pausing a server."""

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.figures.process_time import cpu_seconds

_PROC = Path("/proc")
_LISTENING = "0A"  # state of a socket in /proc/net/tcp
_NOT_BUSY = (3, 4)  # columns of /proc/stat: idle, and waiting for I/O
_COUNTED_COLUMNS = 8  # of /proc/stat: what guests use stands in two columns


def find_listener(port: int) -> int | None:
    """Return the process that listens on a TCP port here; None if it cannot be seen."""
    inodes = set(_list_listening_inodes(port))
    links = {f"socket:[{inode}]" for inode in inodes}
    for folder in _list_process_folders():
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in links:
                        return int(folder.name)
    return None


def _list_listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                address, state, inode = fields[1], fields[3], fields[9]
                if state == _LISTENING and int(address.rpartition(":")[2], 16) == port:
                    yield inode


def list_tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in _list_process_folders():
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:  # grows while it is walked through
        found += children.get(pid, [])
    return found


def _list_process_folders() -> list[Path]:
    return [folder for folder in _PROC.iterdir() if folder.name.isdecimal()]


def pause(roots: Iterable[int]) -> None:
    """Stop processes and their descendants until `resume`, so that they use no CPU."""
    _signal_trees(roots, signal.SIGSTOP)


def resume(roots: Iterable[int]) -> None:
    """Let paused processes run again."""
    _signal_trees(roots, signal.SIGCONT)


def _signal_trees(roots: Iterable[int], sent: signal.Signals) -> None:
    for root in roots:
        for pid in list_tree(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)


class OtherProcessLoad:
    """CPU time that processes outside the benchmark have used since this object was made."""

    def __init__(self, roots: Iterable[int]) -> None:
        """`roots` and their descendants are the known processes; this one is known too."""
        self._roots = [*roots, os.getpid()]
        self._started = perf_counter()
        self._foreign = self._read_foreign_seconds()

    def measure_cores(self) -> float:
        """Return how many cores, in the mean, were busy with anything but known processes."""
        used = self._read_foreign_seconds() - self._foreign
        return max(0.0, used / (perf_counter() - self._started))

    def _read_foreign_seconds(self) -> float:
        known = {pid for root in self._roots for pid in list_tree(root)}
        seconds = 0.0
        for pid in known:
            with contextlib.suppress(OSError):
                seconds += cpu_seconds(pid)
        return _read_busy_seconds() - seconds


def _read_busy_seconds() -> float:
    """Return the seconds that all CPUs were busy or taken by other machines (proc_stat(5))."""
    columns = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    busy = [
        int(ticks)
        for column, ticks in enumerate(columns[:_COUNTED_COLUMNS])
        if column not in _NOT_BUSY
    ]
    return sum(busy) / os.sysconf("SC_CLK_TCK")
