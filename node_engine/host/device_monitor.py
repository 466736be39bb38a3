"""What a node reports of its device: which one it is, its memory, and how well it is used.

Runs on the event loop, once for each heartbeat. A node on a CPU reports the processor and the
memory of its machine.
"""

import platform
from pathlib import Path

from baton.cluster_link.report_types import DeviceReport
from baton.process.clock import Clock
from node_engine.core.metrics.device_peaks import find_device_peaks
from node_engine.core.metrics.step_costs import get_product_precision
from node_engine.core.metrics.utilization import UtilizationWindow, WorkTotals
from node_engine.core.step.engine import DeviceMemory, Engine

_PROC = Path("/proc")
_MAX_NAME_LENGTH = 100  # characters


class DeviceMonitor:
    """Builds the reports about the device of one engine."""

    def __init__(self, engine: Engine, clock: Clock, proc: Path = _PROC) -> None:
        """`proc`: the folder in which the kernel reports the processor and the memory."""
        self._device = engine.compute_device
        self._clock = clock
        self._proc = proc
        self._name = (self._device.name or read_cpu_name(proc))[:_MAX_NAME_LENGTH]
        self._window = UtilizationWindow(
            find_device_peaks(self._device.name), get_product_precision(engine.model_identity)
        )

    def build_report(self, totals: WorkTotals) -> DeviceReport:
        """Describe the device, its memory now, and its MFU and MBU in the last seconds.

        `totals` are the operations, bytes and time of all steps since the node's start.
        """
        measure = self._device.measure_memory
        memory = measure() if measure is not None else read_host_memory(self._proc)
        mfu, mbu = self._window.observe(self._clock(), totals)
        return DeviceReport(
            device=self._device.device,
            name=self._name,
            threads=self._device.threads,
            memory_total_bytes=memory.total_bytes if memory else 0,
            memory_used_bytes=memory.used_bytes if memory else 0,
            mfu=mfu,
            mbu=mbu,
            packed_weight_bytes=self._device.packed_weight_bytes,
            packed_weight_source=self._device.packed_weight_source,
        )


def read_cpu_name(proc: Path = _PROC) -> str:
    """The processor's name; its architecture if the kernel does not report a name."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def read_host_memory(proc: Path = _PROC) -> DeviceMemory | None:
    """The machine's memory; what the kernel could free for processes does not count as used."""
    try:
        fields = dict(
            line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if line
        )
        total, available = (
            int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")
        )
    except (OSError, KeyError, ValueError):
        return None
    return DeviceMemory(total, max(0, total - available))
