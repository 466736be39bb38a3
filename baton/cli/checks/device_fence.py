"""Checks whether peers may write into the memory of this machine's GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.cli.checks.finding import Finding, ok_finding, warning_finding
from baton.cli.checks.machine import run_probe
from baton.config.settings import Config

_NAME = "KV between GPUs"
_TIMEOUT_SECONDS = 30.0


def check_device_fence(config: Config, gpus: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Kill a small writer on each GPU, as a decode node does at start. Nothing without GPUs."""
    may_use = config.engine == "model" and config.device != "cpu" and bool(gpus)
    if not may_use or config.transport not in ("auto", "cuda_ipc"):
        return []
    return [explain_fence(run_fence_probe(config.segment_dir))]


def run_fence_probe(folder: str) -> dict[str, Any]:
    """What `kv_transfer/device/fence_probe.py` finds: `refusals` by GPU, or an `error`."""
    return run_probe("kv_transfer.device.fence_probe", [folder], _TIMEOUT_SECONDS)


def explain_fence(found: Mapping[str, Any]) -> Finding:
    """The finding for what the probe found."""
    reasons = [found["error"]] if "error" in found else sorted({*found["refusals"].values()} - {""})
    if not reasons:
        gpus = len(found["refusals"])
        return ok_finding(_NAME, f"the end of a killed writer is proven on {gpus} GPU (cuda_ipc)")
    return warning_finding(
        _NAME,
        f"staged through host memory, because {reasons[0]}",
        "share the pid namespace and /dev/nvidia-uvm between the nodes, stop MPS,"
        " or set --transport shm",
    )
