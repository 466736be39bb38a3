"""The folder with the pid, the ports and the logs of a cluster: one per HTTP port.

The supervisor holds a file lock on its pid file for its whole life. A pid file whose lock is free
is stale, so that no unrelated process is signalled.
"""

import fcntl
import os
import select
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baton.cli.common.errors import CommandFailed
from baton.config.settings import Config
from baton.errors import ConfigError

_PID_FILE = "up.pid"


def state_folder(config: Config, environ: Mapping[str, str] = os.environ) -> Path:
    """Return --state-dir, or a folder named by the HTTP port.

    That folder is below $XDG_RUNTIME_DIR, ~/.baton or the temporary folder, the first that is
    usable.
    """
    if config.state_dir:
        return Path(config.state_dir).absolute()
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        base = Path(runtime, "baton")
    elif os.access(home := Path(environ.get("HOME", "/nonexistent")), os.W_OK):
        base = home / ".baton"
    else:
        base = Path(tempfile.gettempdir(), f"baton-{os.getuid()}")
    return base / str(config.port)


class PidFile:
    """The locked pid file, held by the supervisor."""

    def __init__(self, folder: Path) -> None:
        """Lock the file.

        Raises ConfigError when a cluster already runs from `folder`, or the folder cannot be used.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(folder / _PID_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"state folder {folder}: {error.strerror}: choose another with --state-dir"
            ) from None
        if not _try_lock_pid_file(self._fd):
            owner = os.pread(self._fd, 32, 0).decode().strip()
            os.close(self._fd)
            raise ConfigError(
                f"a cluster runs from {folder} already (pid {owner}): stop it with `baton down`"
            )

    def write_pid(self) -> None:
        """Write the pid of this process. Separate from locking: `--detach` forks after the lock."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def stop_cluster(folder: Path, timeout_seconds: float) -> bool:
    """Stop the supervisor of `folder`; return whether it ended by itself.

    It gets SIGTERM, and after `timeout_seconds` SIGKILL, which ends its children too. Raises
    CommandFailed when no cluster runs from `folder`.
    """
    try:
        fd = os.open(folder / _PID_FILE, os.O_RDONLY)
    except OSError:
        raise CommandFailed(
            f"no cluster runs from {folder}: name it with --port or --state-dir"
        ) from None
    try:
        text = os.pread(fd, 32, 0).strip()
        pidfd = os.pidfd_open(int(text)) if text else None
        # The lock is checked after the pidfd is open: if it is held, the pidfd is the supervisor's.
        if pidfd is None or _try_lock_pid_file(fd):
            raise CommandFailed(
                f"no cluster runs from {folder}: name it with --port or --state-dir"
            )
    except ProcessLookupError:
        raise CommandFailed(
            f"no cluster runs from {folder}: name it with --port or --state-dir"
        ) from None
    finally:
        os.close(fd)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if _wait_for_exit(pidfd, timeout_seconds):
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _wait_for_exit(pidfd, timeout_seconds)
        return False
    finally:
        os.close(pidfd)


def _wait_for_exit(pidfd: int, timeout_seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def _try_lock_pid_file(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
