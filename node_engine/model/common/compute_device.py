"""Describes the device that a model computes on, and measures its memory."""

from functools import partial

import torch

from node_engine.core.step.engine import ComputeDevice, DeviceMemory


def describe_device(device: torch.device) -> ComputeDevice:
    """Describe `device`, which engines of this process compute on."""
    if device.type != "cuda":
        return ComputeDevice(device.type, threads=torch.get_num_threads())
    index = torch.cuda.current_device() if device.index is None else device.index
    return ComputeDevice(
        f"cuda:{index}",
        torch.cuda.get_device_name(index),
        measure_memory=partial(measure_gpu_memory, index),
    )


def measure_gpu_memory(index: int) -> DeviceMemory | None:
    """Ask the driver of a GPU for its memory; None if the GPU has failed.

    This launches nothing, and counts what other processes use as well.
    """
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:
        return None
    return DeviceMemory(total, total - free)
