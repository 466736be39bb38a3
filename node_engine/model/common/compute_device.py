"""Describes the device that a model computes on, and measures its memory."""

import os
from functools import partial

import torch

from node_engine.core.step.engine import ComputeDevice, DeviceMemory


def describe_device(device: torch.device) -> ComputeDevice:
    """Describe `device`, which engines of this process compute on."""
    if device.type != "cuda":
        return ComputeDevice(device.type, threads=torch.get_num_threads())
    index = torch.cuda.current_device() if device.index is None else device.index
    return ComputeDevice(
        name_gpu(index, os.environ.get("CUDA_VISIBLE_DEVICES", "")),
        torch.cuda.get_device_name(index),
        measure_memory=partial(measure_gpu_memory, index),
    )


def name_gpu(index: int, visible_devices: str) -> str:
    """The GPU that has the number `index` in this process, by its number on the machine.

    `visible_devices` (CUDA_VISIBLE_DEVICES) renumbers GPUs, unless it is empty or has names only.
    """
    visible = [name.strip() for name in visible_devices.split(",")]
    number = visible[index] if index < len(visible) and visible[index].isdecimal() else index
    return f"cuda:{number}"


def measure_gpu_memory(index: int) -> DeviceMemory | None:
    """Ask the driver of a GPU for its memory; None if the GPU has failed.

    This launches nothing, and counts what other processes use as well.
    """
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:
        return None
    return DeviceMemory(total, total - free)
