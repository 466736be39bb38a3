"""The folder in which nodes keep packed weights from one start to the next, as it is configured."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.config.memory_size import AUTO, parse_memory_size
from baton.config.node_config import NO_WEIGHT_CACHE, NodeConfig
from baton.errors import ConfigError

IMAGE_FILE_SUFFIX = ".weights"


@dataclass(frozen=True, slots=True)
class WeightCacheSettings:
    """Where packed weights are kept, and how much of them."""

    folder: Path
    max_bytes: int  # of all cached models together
    is_explicit: bool  # whether somebody named the folder, and so expects it to work


def resolve_weight_cache(
    config: NodeConfig, environ: Mapping[str, str] = os.environ
) -> WeightCacheSettings | None:
    """Return where packed weights are kept; None if nowhere. Raises ConfigError for a bad size.

    auto is baton/weights below $XDG_CACHE_HOME, or below ~/.cache.
    """
    chosen = config.weight_cache_dir
    if chosen == NO_WEIGHT_CACHE:
        return None
    folder = _default_folder(environ) if chosen == AUTO else Path(chosen).absolute()
    if folder is None:
        return None
    size = parse_memory_size(
        config.weight_cache_size, _filesystem_bytes(folder), "weight_cache_size"
    )
    return WeightCacheSettings(folder, size, is_explicit=chosen != AUTO)


def require_private_folder(folder: Path) -> None:
    """Create the folder if it does not exist.

    Raises OSError if it cannot be used, and PermissionError if other users can write to it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            0,
            f"it belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}, "
            "and only its owner may write to it",
        )


def invalid_folder_error(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"weight_cache_dir {folder}: {error.strerror}: give --weight-cache-dir a folder of this "
        f"user, or {NO_WEIGHT_CACHE}",
        param="weight_cache_dir",
    )


def _default_folder(environ: Mapping[str, str]) -> Path | None:
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if Path(cache).is_absolute():
        base = Path(cache)
    elif Path(home).is_absolute():
        base = Path(home, ".cache")
    else:
        return None
    return base / "baton" / "weights"


def _filesystem_bytes(folder: Path) -> int:
    """Size of the file system that the folder is on, or will be created on.

    If that cannot be found out, because a parent cannot be searched, it is the parent's. Whoever
    uses the folder says that it cannot be used.
    """
    for path in (folder, *folder.parents):
        with suppress(OSError):
            stat = os.statvfs(path)
            return stat.f_blocks * stat.f_frsize
    return 0
