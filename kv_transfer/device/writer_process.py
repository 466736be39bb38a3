"""Proof that a process, and every write that its device had queued, has ended.

A process that writes into a peer's device memory is no longer there before its device stops: after
SIGKILL a running kernel writes on for milliseconds. docs/design/0019-kv-between-gpus.md has what
was measured. So three things together prove the end, and each of them is refused where it does not
hold:

- the lock on a file that the process opened before its device's driver opened any, so that the
  kernel closes it after the driver's files;
- the process's pidfd, which becomes readable when its last thread has ended;
- a lock on the driver's own file, on a descriptor that the driver itself has opened, which forked
  children inherit.

`ProvableWriter` is the writer's end, `WriterProof` that of the owner of the memory.
"""

import fcntl
import os
import select
from pathlib import Path

import msgspec

from baton.errors import UnmappableSegment
from baton.shared_memory.byte_locks import try_lock_byte
from baton.shared_memory.segment import WRITER_NAME, create_writer_file

_MAX_RECORD_BYTES = 4096
_SCHEME = "device://"
_ALIVE_BYTE = 0  # of the writer's file
NO_DRIVER_FILE = Path("/dev/null")  # a device without one


def name_writer(name: str) -> str:
    """The endpoint of a node whose device writes to peers; empty without a name."""
    return f"{_SCHEME}{name}" if name else ""


def parse_writer(endpoint: str) -> str:
    """The name in such an endpoint; empty for any other."""
    name = endpoint.removeprefix(_SCHEME)
    return name if name != endpoint and WRITER_NAME.fullmatch(name) else ""


class WriterRecord(msgspec.Struct, frozen=True):
    """What a writer states about itself in its file."""

    pid: int
    pid_namespace: str
    device: str  # kind and identity of the device, for the log
    driver_inode: tuple[int, int]  # st_dev and st_ino of the driver's file as the writer sees it


class UnprovableEnd(Exception):
    """The end of this process's device work could not be proven. The message says why."""


class ProvableWriter:
    """This process as a writer. Created before the device's driver is initialized."""

    def __init__(self, folder: Path) -> None:
        """Creates and locks the file. Raises ConfigError if the folder cannot hold it."""
        self._path, self._fd = create_writer_file(folder)
        if not try_lock_byte(self._fd, _ALIVE_BYTE):
            raise RuntimeError(f"{self._path} is new and locked already")
        self._driver_fd = -1
        self.is_published = False

    @property
    def name(self) -> str:
        """The name that peers open; empty until `publish`."""
        return self._path.name if self.is_published else ""

    def publish(self, device: str, driver_file: Path) -> None:
        """State that the end of this process can be proven; the driver is initialized now.

        Raises UnprovableEnd if it cannot.
        """
        if self.is_published:
            return
        driver = os.stat(driver_file)
        if driver_file != NO_DRIVER_FILE:
            self._driver_fd = self._lock_driver_file(driver_file)
        record = WriterRecord(
            os.getpid(),
            os.readlink("/proc/self/ns/pid"),
            device,
            (driver.st_dev, driver.st_ino),
        )
        os.pwrite(self._fd, msgspec.json.encode(record), 0)
        self.is_published = True

    def _lock_driver_file(self, driver_file: Path) -> int:
        opened = list_descriptors_of(driver_file)
        if not opened:
            raise UnprovableEnd(f"this process has no descriptor of {driver_file} (MPS?)")
        lowest = min(opened)
        if self._fd >= lowest:
            raise UnprovableEnd(
                f"the lock has descriptor {self._fd}, not below {lowest} of {driver_file}"
            )
        if not try_lock_byte(lowest, os.getpid()):
            raise UnprovableEnd(f"byte {os.getpid()} of {driver_file} is locked by another process")
        return lowest

    def close(self) -> None:
        """Remove the file. Locks of a process with a driver last until it has ended.

        Its device may have work left that nobody waited for.
        """
        self.is_published = False
        self._path.unlink(missing_ok=True)
        if self._driver_fd < 0:
            os.close(self._fd)


class WriterProof:
    """The proof that one writer process has ended. Created while the process lives."""

    def __init__(self, folder: Path, name: str, driver_file: Path) -> None:
        """Raises UnmappableSegment if the end of this writer could not be proven here."""
        self._has_ended = False
        self._fds: list[int] = []
        try:
            self._open(folder, name, driver_file)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, name: str, driver_file: Path) -> None:
        if WRITER_NAME.fullmatch(name) is None:
            raise UnmappableSegment(f"{name[:80]!r} is not the name of a writer process")
        try:
            self._lock_fd = self._keep(os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW))
            if os.fstat(self._lock_fd).st_uid != os.geteuid():
                raise UnmappableSegment(f"writer {name} is of another user")
            self.record = _read_record(self._lock_fd)
            if self.record.pid_namespace != os.readlink("/proc/self/ns/pid"):
                raise UnmappableSegment(f"writer {name} is in another pid namespace")
            self._pidfd = self._keep(os.pidfd_open(self.record.pid))
            self._driver_fd = self._open_driver_file(driver_file)
        except OSError as error:
            raise UnmappableSegment(f"writer {name} in {folder}: {error.strerror}") from error
        if self._is_process_gone() or try_lock_byte(self._lock_fd, _ALIVE_BYTE):
            raise UnmappableSegment(f"writer {name} has ended")
        if self._driver_fd >= 0 and try_lock_byte(self._driver_fd, self.record.pid):
            raise UnmappableSegment(f"writer {name} holds no lock on {driver_file}")

    def _open_driver_file(self, driver_file: Path) -> int:
        if driver_file == NO_DRIVER_FILE:
            return -1
        fd = self._keep(os.open(driver_file, os.O_RDWR))
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) != self.record.driver_inode:
            raise UnmappableSegment(f"{driver_file} is another file for the writer than here")
        return fd

    def has_ended(self) -> bool:
        """Whether nothing that the process has begun can write any more. Stays true."""
        if not self._has_ended and self._is_process_gone() and self._are_locks_released():
            self._has_ended = True
            self.close()
        return self._has_ended

    def _are_locks_released(self) -> bool:
        return try_lock_byte(self._lock_fd, _ALIVE_BYTE) and (
            self._driver_fd < 0 or try_lock_byte(self._driver_fd, self.record.pid)
        )

    def _is_process_gone(self) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        """Without an end that is proven by now, there will be no proof."""
        while self._fds:
            os.close(self._fds.pop())


def _read_record(fd: int) -> WriterRecord:
    try:
        return msgspec.json.decode(os.pread(fd, _MAX_RECORD_BYTES, 0), type=WriterRecord)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnmappableSegment(f"the record of the writer is damaged: {error}") from error


def list_descriptors_of(path: Path) -> list[int]:
    """This process's descriptors of a file, whatever path it was opened by."""
    wanted = os.stat(path)
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            stat = os.fstat(int(entry))
        except OSError:  # closed since, as is that of the listing itself
            continue
        if (stat.st_dev, stat.st_ino, stat.st_rdev) == (
            wanted.st_dev,
            wanted.st_ino,
            wanted.st_rdev,
        ) and fcntl.fcntl(int(entry), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            found.append(int(entry))
    return sorted(found)
