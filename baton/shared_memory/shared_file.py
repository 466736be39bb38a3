"""A file that several processes use at once, and that the last of them removes.

Each user holds a shared `flock` on the file. One that can make its lock exclusive is the last.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def release_shared_file(path: Path, fd: int, opener_pid: int) -> None:
    """Close a file on which `fd` has the lock of a user, and remove it if no other user is left.

    `opener_pid` is the id of the process that opened `fd`. A process that it forks has a copy of
    the descriptor and shares its lock, so that it could always make the lock exclusive. There the
    descriptor is only closed: the file is still used by the parent.
    """
    if os.getpid() == opener_pid:
        with suppress(OSError):  # another process uses it, or the folder is gone
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed before, and the path be that of a new one.
            if os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False)):
                path.unlink()
    os.close(fd)
