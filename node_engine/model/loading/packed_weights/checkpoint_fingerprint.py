"""Recognizes a checkpoint whose tensors were hashed before, without reading them again.

The fingerprint of a safetensors file is its size, the times of its last change (mtime and ctime,
in nanoseconds), its inode and a hash of its header. The kernel sets ctime at every write and no
program can set it back, so a file that was written to has another fingerprint, also if its mtime
was restored. The path is not part of it.

Time stamps have a resolution. A file that changed less than two seconds before its fingerprint was
taken could change again without a trace, so such a fingerprint is not remembered.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from baton.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20  # the bound that safetensors has for its header
_SETTLED_NS = 2_000_000_000  # above the resolution of time stamps on common file systems


@dataclass(frozen=True, slots=True)
class CheckpointFingerprint:
    """Changes whenever one of the files changes."""

    files: tuple[str, ...]  # of each file: size, mtime, ctime, inode, XXH3-128 of the header
    is_settled: bool  # whether a later change is certain to change the fingerprint


def take_fingerprint(shards: Sequence[Path]) -> CheckpointFingerprint:
    """Read the headers and the attributes of the files. Raises ConfigError that names the file."""
    found, newest_ns = [], 0
    for path in shards:
        try:
            text, changed_ns = _describe_file(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}: download it again") from None
        found.append(text)
        newest_ns = max(newest_ns, changed_ns)
    return CheckpointFingerprint(
        tuple(sorted(found)), is_settled=newest_ns + _SETTLED_NS < read_wall_clock_ns()
    )


def read_wall_clock_ns() -> int:
    """The clock that also stamps files."""
    return time.time_ns()


def _describe_file(path: Path) -> tuple[str, int]:
    """Return the fingerprint of one file, and when it was changed last."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        prefix = file.read(8)  # the length of the header, which is JSON
        length = int.from_bytes(prefix, "little")
        header = file.read(min(length, _MAX_HEADER_BYTES))
    parts = (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        xxhash.xxh3_128_hexdigest(prefix + header),
    )
    return " ".join(map(str, parts)), max(status.st_mtime_ns, status.st_ctime_ns)
