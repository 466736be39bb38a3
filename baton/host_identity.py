"""Which host is this? Two processes may share memory if they see the same segment folder, and that is what is
identified: this boot of this kernel, and the folder's device and inode on it. No file is left behind."""

import hashlib
import os
from pathlib import Path

from baton.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity(segment_dir: str) -> str:
    """32 hex digits, equal for processes whose `segment_dir` is the same folder. Two containers with a tmpfs each
    differ. Raises ConfigError when the folder cannot be used."""
    try:
        folder = os.stat(segment_dir)
        boot = _BOOT_ID.read_text().strip()
    except OSError as error:
        raise ConfigError(f"segment_dir {segment_dir!r} cannot be used: {error.strerror}: give --segment-dir") from None
    return hashlib.sha256(f"{boot}/{folder.st_dev}/{folder.st_ino}".encode()).hexdigest()[:32]
