"""Remembers what measured steps took, so that a restart need not measure them again."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.models.weight_cache import WeightCacheSettings, require_private_folder
from baton.process import log
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
        """`key`: everything that decides which steps are measured and how long they take."""
        self._files = SmallFiles(folder, ".steps", _MAX_BYTES)
        self._key = json.dumps(key, sort_keys=True)
        self._wall_clock = wall_clock

    def find_times(self) -> list[float] | None:
        """Seconds of each step, in the order of measuring; None if they have to be measured."""
        content = self._files.read(self._key, self._wall_clock(), MAX_AGE_SECONDS)
        try:
            times = None if content is None else json.loads(content)
        except ValueError:
            return None
        return times if _are_times(times) else None

    def save_times(self, times: Sequence[float]) -> None:
        """Remember times. What prevents it is logged."""
        try:
            self._files.write(self._key, json.dumps(list(times)).encode())
        except (OSError, ValueError) as error:
            log.get_logger("engine").warning(
                "measured steps are not cached", folder=str(self._files.folder), error=str(error)
            )


def open_step_times_cache(
    settings: WeightCacheSettings | None, key: Mapping[str, object]
) -> StepTimesCache | None:
    """The cache in the folder of cached weights; None without one, or if it cannot be used."""
    if settings is None:
        return None
    try:
        require_private_folder(settings.folder)
    except OSError:  # the log says so, where weights are packed
        return None
    return StepTimesCache(settings.folder, key)


def _are_times(times: object) -> bool:
    return isinstance(times, list) and all(
        isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0.0
        for seconds in times
    )
