"""Checks the folder in which nodes keep packed weights."""

import os

from baton.cli.checks.finding import Finding, bad_finding, ok_finding, warning_finding
from baton.config.settings import Config
from baton.errors import ConfigError
from baton.models.weight_cache import (
    IMAGE_FILE_SUFFIX,
    invalid_folder_error,
    require_private_folder,
    resolve_weight_cache,
)
from baton.shared_memory.available_memory import format_size

_NAME = "weight cache"
_FIX = "give --weight-cache-dir a folder of this user on a disk with room"


def check_weight_cache(config: Config) -> Finding:
    """Check that packed weights can be kept, and say how much of them there is."""
    if config.engine != "model":
        return ok_finding(_NAME, f"none: --engine {config.engine}")
    try:
        settings = resolve_weight_cache(config)
    except ConfigError as error:
        return bad_finding(_NAME, error.message, "set --weight-cache-size")
    if settings is None:
        return ok_finding(_NAME, "off: weights are packed at each start")
    try:
        require_private_folder(settings.folder)
        sizes = [
            entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(settings.folder)
            if entry.name.endswith(IMAGE_FILE_SUFFIX)
        ]
    except OSError as error:
        detail = f"{settings.folder}: {error.strerror}"
        if settings.is_explicit:
            return bad_finding(_NAME, invalid_folder_error(settings.folder, error).message, _FIX)
        return warning_finding(_NAME, f"{detail}: weights are packed at each start", _FIX)
    return ok_finding(
        _NAME,
        f"{settings.folder}: {len(sizes)} models, {format_size(sum(sizes))} of at most "
        f"{format_size(settings.max_bytes)}",
    )
