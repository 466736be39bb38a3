"""Remembers what measured steps took, so that a restart need not measure them again."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.models.weight_cache import WeightCacheSettings
from baton.process import log
from node_engine.model.loading.packed_weights.cache_folder import prepare_cache_folder
from node_engine.model.loading.packed_weights.small_files import SmallFiles

MAX_AGE_SECONDS = 86_400.0  # other work may have slowed the machine when they were measured
_MAX_BYTES = 4096


class StepTimesCache:
    """The times of the steps of one engine on one machine, in the folder of cached weights."""

    def __init__(
        self,
        folder: Path,
        key: Mapping[str, object],
        wall_clock: Callable[[], float] = time.time,  # seconds since the epoch
    ) -> None:
        """`key`: everything that decides how long steps take."""
        self._files = SmallFiles(folder, ".steps", _MAX_BYTES)
        self._key = json.dumps(key, sort_keys=True)
        self._wall_clock = wall_clock

    def find_times(self) -> list[tuple[int, float]]:
        """Tokens and seconds of each step, in the order of measuring; empty if none are kept."""
        file = self._files.read(self._key)
        if file is None or not 0.0 <= self._wall_clock() - file.written_at <= MAX_AGE_SECONDS:
            return []
        try:
            return [
                (int(tokens), _parse_seconds(taken)) for tokens, taken in json.loads(file.content)
            ]
        except (ValueError, TypeError):
            return []

    def save_times(self, times: list[tuple[int, float]]) -> None:
        """Remember times. What prevents it is logged."""
        try:
            self._files.write(self._key, json.dumps(times).encode())
        except (OSError, ValueError) as error:
            log.get_logger("engine").warning(
                "measured steps are not cached", folder=str(self._files.folder), error=str(error)
            )


def open_step_times_cache(
    settings: WeightCacheSettings | None, key: Mapping[str, object]
) -> StepTimesCache | None:
    """The cache in the folder of cached weights; None without one, or if it cannot be used.

    Raises ConfigError if it cannot be used although somebody named it.
    """
    if settings is None or not prepare_cache_folder(settings):
        return None
    return StepTimesCache(settings.folder, key)


def _parse_seconds(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value) or value < 0.0:
        raise ValueError(f"{value!r} is no duration")
    return value
