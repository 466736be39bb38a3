"""Shared memory where nodes record that they are computing, to divide the cores of their host.

Those that compute at the same time divide the cores. The memory is one page of a file, which all
nodes with the same cores map. Each node locks a byte of the file, whose number is its slot on the
page, and the kernel releases the lock when the node dies. The page is laid out as
kernels/kv_kernels/native/src/core_sharing.h says.
"""

import fcntl
import hashlib
import mmap
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from baton.process import log
from baton.process.cores import count_usable_cores, has_core_quota
from baton.shared_memory.byte_locks import try_lock_byte
from baton.shared_memory.memory_map import HUGE_PAGE
from baton.shared_memory.segment import SEGMENT_PREFIX
from baton.shared_memory.shared_file import release_shared_file

_NUM_SLOTS = 62  # kSharingSlots of core_sharing.h
_MAX_ATTEMPTS = 100  # to open a file that other processes remove meanwhile
_CGROUP_FOLDER = Path("/sys/fs/cgroup")


@dataclass(frozen=True, eq=False)
class HostCores:
    """The slot in which this process announces that it computes, and the number of cores.

    It is a CoreSharingSlot, see kv_kernels/native/core_sharing.py. The slot is taken as long as the
    object lives.
    """

    page: mmap.mmap
    address: int
    slot: int
    cores: int


# A process has one slot. A model and its draft model compute one after the other. Several engines
# that compute at once, as those of two `LLM`s, count as one.
_open_pages = WeakValueDictionary[Path, HostCores]()
os.register_at_fork(after_in_child=_open_pages.clear)  # the slots are those of the parent


def open_host_cores(folder: Path) -> HostCores | None:
    """Map the page that all processes on the same cores map, and take a slot on it.

    None, with a warning, if that cannot be.
    """
    path = folder / f"{SEGMENT_PREFIX}cores-{compute_cores_id()}"
    found = _open_pages.get(path)
    if found is None:
        try:
            found = _open_page(path)
        except OSError as error:
            log.get_logger("engine").warning(
                "this node does not see when others on its cores compute", reason=str(error)
            )
            return None
        _open_pages[path] = found
    return found


def compute_cores_id() -> str:
    """32 hexadecimal digits, equal for processes of a user that share the same cores."""
    cores = sorted(os.sched_getaffinity(0))
    # Containers with a quota each have theirs, although they run on the same cores.
    container = os.stat(_CGROUP_FOLDER).st_ino if has_core_quota() else 0
    user = os.geteuid()  # nobody else can open the file
    return hashlib.sha256(f"{user} {container} {cores}".encode()).hexdigest()[:32]


def _open_page(path: Path) -> HostCores:
    """Open or create the file of the shared page, map it and lock a free slot. Raises OSError."""
    fd = _open_locked(path)
    try:
        slot = next((slot for slot in range(_NUM_SLOTS) if try_lock_byte(fd, slot)), None)
        if slot is None:
            raise OSError(f"all {_NUM_SLOTS} slots of {path} are taken")
        os.truncate(fd, HUGE_PAGE)  # what every segment is a multiple of; one page is used
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)  # a store to a page without memory is a fault
        page = mmap.mmap(fd, mmap.PAGESIZE)
    except OSError:
        release_shared_file(path, fd, os.getpid())
        raise
    address = np.frombuffer(page, np.uint8).ctypes.data
    cores = HostCores(page, address, slot, count_usable_cores())
    weakref.finalize(cores, release_shared_file, path, fd, os.getpid())
    return cores


def _open_locked(path: Path) -> int:
    """Open the file, or create it, with the lock that says that it is used. Raises OSError."""
    for _ in range(_MAX_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise OSError(f"{path} belongs to user {found.st_uid}")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # it was removed before it was locked
    raise OSError(f"{path} is removed again and again")
