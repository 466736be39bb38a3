"""`python -m baton.cli.supervisor.visible_gpus`: the number of GPUs that a process sees here.

The driver counts them, by CUDA_VISIBLE_DEVICES. It is asked in a process of its own, because it
keeps memory, threads and device files in every process that asks it.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

from baton.config.settings import Config

_COMMAND = [sys.executable, "-m", "baton.cli.supervisor.visible_gpus"]
_TIMEOUT_SECONDS = 60.0  # the first user of a GPU waits for the driver to initialise it


def count_visible_gpus(config: Config, root: Path = Path("/")) -> int:
    """How many GPUs nodes see here; 0 if they use none. `root` is the root folder."""
    if config.engine != "model" or config.device == "cpu" or not _has_device_files(root):
        return 0
    try:
        counted = subprocess.run(
            _COMMAND, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
        )
        return int(counted.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0  # nodes report a driver that does not answer


def _has_device_files(root: Path) -> bool:
    files = [*root.glob("dev/nvidia[0-9]*"), *root.glob("dev/dxg")]  # dxg: Windows Subsystem
    return bool(files)


def ask_driver() -> int:
    """Count with the driver's library; 0 if there is none or it fails."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


if __name__ == "__main__":
    print(ask_driver())
