"""The device memory of both ends of a transfer pair.

On CPUs it is host memory with a thread as its stream (kv_transfer/device/host_memory.py). That runs
the whole transport but for the CUDA calls, and does not show what a GPU writes after a kill.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from baton.kv.blocks import KVLayout
from baton.shared_memory.segment import Segment
from kv_transfer.device.device_memory import TransferDevice
from kv_transfer.device.host_memory import HOST_DEVICE, HostMemory
from kv_transfer.device.writer_process import NO_DRIVER_FILE, ProvableWriter


@dataclass(frozen=True)
class DevicePair:
    """Device memory of decode and prefill, and their blocks as tests see them."""

    decode: TransferDevice
    prefill: TransferDevice
    decode_arena: Any  # [block][layer][byte]
    prefill_arena: Any
    writer: ProvableWriter | None = None  # to be closed

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        if self.writer is not None:
            self.writer.close()


DevicePairFactory = Callable[[KVLayout, Path, Segment, NDArray[Any], NDArray[Any]], DevicePair]


def make_host_pair(
    layout: KVLayout, folder: Path, arena: Segment, target: NDArray[Any], source: NDArray[Any]
) -> DevicePair:
    """Both ends in host memory: decode's in its segment, prefill's in `source`."""
    shape = (-1, layout.num_layers, layout.slab_bytes)
    writer = ProvableWriter(folder)
    writer.publish(HOST_DEVICE, NO_DRIVER_FILE)
    decode, prefill = (
        HostMemory(memory, size // layout.block_bytes, layout, folder, arena.name, writer.name)
        for memory, size in ((arena.view, target.nbytes), (source.data, source.nbytes))
    )
    return DevicePair(
        decode,
        prefill,
        target.reshape(shape),
        source.reshape(shape),
        writer,
    )
