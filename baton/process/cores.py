"""How many cores this process may use."""

import math
import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the process's own cgroup in a container


def count_usable_cores(quota_file: Path = _CGROUP_QUOTA) -> int:
    """Count the cores of this process's affinity, within the CPU quota of its container.

    A container with a quota of two cores on a machine of 64 sees all of them, and the kernel stops
    its threads for most of the time if it runs one on each. A quota of 1.5 cores counts as 2.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _read_quota(quota_file)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def has_core_quota(quota_file: Path = _CGROUP_QUOTA) -> bool:
    """Whether the container of this process has a CPU quota."""
    return _read_quota(quota_file) is not None


def _read_quota(quota_file: Path) -> float | None:
    """The quota in cores; None if there is none, or the file is not that of cgroup v2."""
    try:
        quota, period = quota_file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
