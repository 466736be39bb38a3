"""A pytest plugin: the contract suite's pairs over cuda_ipc get memory of an NVIDIA GPU.

    python -m pytest -p tests.gpu.cuda_pairs tests/contract -k cuda_ipc

The plugin opens the lock of this process before CUDA opens its files, as a node does. With two GPUs
decode's memory is on the second.
"""

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from baton.kv.blocks import KVLayout
from baton.shared_memory.segment import WRITER_NAME, Segment
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaDriver
from kv_transfer.device.cuda_memory import CudaMemory
from kv_transfer.device.writer_process import ProvableWriter
from tests.contract.device_pair import DevicePair
from tests.contract.transfer_pair import DEVICE_PAIRS

_FOLDER = Path(tempfile.mkdtemp(prefix="baton-cuda-pairs-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_WRITER = ProvableWriter(_FOLDER)  # no import has initialized CUDA


class DeviceArena:
    """Device memory [block][layer][byte] as tests index it: read to the host, written in place."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def __getitem__(self, index: Any) -> Any:
        return self._memory.cpu().numpy()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, int):
            value = torch.from_numpy(value.copy()).to(self._memory.device)
        self._memory[index] = value
        torch.cuda.synchronize(self._memory.device)


def make_cuda_pair(
    layout: KVLayout, folder: Path, arena: Segment, target: NDArray[Any], source: NDArray[Any]
) -> DevicePair:
    """Both ends on GPUs of this machine, with the contents of the host's arenas."""
    devices = [torch.device("cuda", index) for index in (0, torch.cuda.device_count() - 1)]
    shape = (-1, layout.num_layers, layout.slab_bytes)
    prefill, decode = (
        torch.from_numpy(host.copy()).to(device).view(shape)
        for host, device in zip((source, target), devices, strict=True)
    )
    CudaDriver(0)
    _WRITER.publish(f"cuda {devices[0]}", Path(UVM_FILE))
    link = folder / _WRITER.name
    assert WRITER_NAME.fullmatch(link.name)
    if not link.exists():
        link.hardlink_to(_FOLDER / _WRITER.name)
    return DevicePair(
        CudaMemory(decode, len(decode), layout, "", receives=True),
        CudaMemory(prefill, len(prefill), layout, _WRITER.name, receives=True),
        DeviceArena(decode),
        DeviceArena(prefill),
    )


DEVICE_PAIRS.make = make_cuda_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out writers in a process of their own, which has memory of the host."""
    reason = "tests/gpu/test_fencing_on_gpu.py kills and stops writers with memory of a GPU"
    for item in items:
        if item.path.stem == "test_frozen_writers":
            item.add_marker(pytest.mark.skip(reason=reason))
