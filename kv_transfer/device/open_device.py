"""Makes a node's DeviceMemory, or says why its KV travels through host memory."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.process import log
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaDriver, CudaError
from kv_transfer.device.device_memory import DeviceMemory
from kv_transfer.device.fence_self_test import FenceFailed, check_fence
from kv_transfer.device.host_memory import HOST_DEVICE, HostMemory
from kv_transfer.device.writer_process import NO_DRIVER_FILE, UnprovableEnd, WriterProcess

if TYPE_CHECKING:  # torch is imported by nodes that compute on a GPU
    import torch

_DEVICE_TRANSPORTS = ("auto", CUDA_IPC)
_MPS_PIPE_FOLDER = "/tmp/nvidia-mps"  # where CUDA looks for a server by default


def open_writer_process(folder: Path, transport: str, *, may_use_gpu: bool) -> WriterProcess | None:
    """This process as a writer, before any call of CUDA. None if no device will write."""
    has_gpu = may_use_gpu and Path(UVM_FILE).exists()
    if transport == CUDA_IPC or (has_gpu and transport in _DEVICE_TRANSPORTS):
        return WriterProcess(folder)
    return None


def open_host_memory(
    arena: memoryview,
    num_blocks: int,
    layout: KVLayout,
    folder: Path,
    segment: str,
    writer: WriterProcess,
) -> DeviceMemory:
    """The stand-in of a node that computes on a CPU: for tests of the transport, not for speed."""
    writer.publish(HOST_DEVICE, NO_DRIVER_FILE)
    log.get_logger("transfer").warning(
        "cuda_ipc without a GPU: KV moves through shared memory, for tests; use shm"
    )
    return HostMemory(arena, num_blocks, layout, folder, segment, writer.name)


def open_cuda_memory(
    arena: "torch.Tensor",
    num_blocks: int,
    layout: KVLayout,
    folder: Path,
    transport: str,
    writer: WriterProcess,
) -> DeviceMemory | None:
    """The device memory of a node on a GPU; None if it can neither write nor be written to.

    Tries the fence (fence_self_test.py), which takes half a second. Raises ConfigError if the
    setting is cuda_ipc and there is none.
    """
    from kv_transfer.device.cuda_memory import CudaMemory

    logger, reasons = log.get_logger("transfer"), []
    try:
        _require_no_mps()
        device = arena.device.index or 0
        writer.publish(f"cuda {CudaDriver(device).device_uuid()}", Path(UVM_FILE))
    except (UnprovableEnd, CudaError, OSError) as error:
        reasons.append(f"writes: {error}")
    receives = False
    try:
        _require_no_mps()
        trial = check_fence(arena.device.index or 0, folder)
        receives = True
        logger.info("fence self-test passed", proof_seconds=round(trial.proof_seconds, 3))
    except (FenceFailed, UnprovableEnd) as error:
        reasons.append(f"receives: {error}")
    memory = None
    if writer.name or receives:
        try:
            memory = CudaMemory(arena, num_blocks, layout, writer.name, receives=receives)
            memory.export_arena()
            memory.warm_up()
        except (UnmappableSegment, CudaError) as error:
            reasons.append(str(error))
            memory = None
    if reasons:
        logger.warning("KV from GPU to GPU is not used", reasons=reasons)
    if memory is None and transport == CUDA_IPC:
        raise ConfigError(f"transport cuda_ipc cannot be used here: {'; '.join(reasons)}")
    return memory


def _require_no_mps() -> None:
    """Raise UnprovableEnd if CUDA's work may run in the process of an MPS server."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPE_FOLDER))
    try:
        is_running = stat.S_ISFIFO((folder / "control").stat().st_mode)
    except OSError:
        is_running = False
    if is_running:
        raise UnprovableEnd(f"an MPS server listens in {folder}: its kernels outlive its clients")
