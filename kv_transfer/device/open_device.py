"""Makes a node's TransferDevice, or says why its KV travels through host memory."""

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.process import log
from baton.shared_memory.segment import Segment
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.device.cuda_driver_api import UVM_FILE, CudaDriver, CudaError
from kv_transfer.device.device_memory import DeviceFailed, TransferDevice
from kv_transfer.device.fence_self_test import FenceFailed, check_fence
from kv_transfer.device.host_memory import HOST_DEVICE, HostMemory
from kv_transfer.device.writer_process import NO_DRIVER_FILE, ProvableWriter, UnprovableEnd

if TYPE_CHECKING:  # torch is imported by nodes that compute on a GPU
    import torch

_MPS_PIPE_FOLDER = "/tmp/nvidia-mps"  # where CUDA looks for a server by default


class _ArenaParts(Protocol):
    """What is needed of a node's arena."""

    @property
    def segment(self) -> Segment: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_memory(self) -> memoryview: ...


@runtime_checkable
class _HasDeviceArena(Protocol):
    """An engine that computes in the memory of a GPU."""

    @property
    def layout(self) -> KVLayout: ...
    @property
    def device_arena(self) -> "torch.Tensor": ...
    def void_loads(self, blocks: Sequence[int]) -> None: ...


class _HasKVLayout(Protocol):
    @property
    def layout(self) -> KVLayout: ...


def open_writer(config: NodeConfig, opened: ExitStack) -> ProvableWriter | None:
    """This process as a writer, before any call of CUDA. None if no device will write.

    `opened` closes it."""
    has_gpu = config.engine != "paced" and config.device != "cpu" and Path(UVM_FILE).exists()
    if config.transport != CUDA_IPC and not (has_gpu and config.transport == "auto"):
        return None
    writer = ProvableWriter(Path(config.segment_dir))
    opened.callback(writer.close)
    return writer


def open_device(
    config: NodeConfig,
    engine: _HasKVLayout,
    arena: _ArenaParts,
    writer: ProvableWriter | None,
    opened: ExitStack,
) -> TransferDevice | None:
    """The memory that the engine computes in, for peers of this host; None if KV is staged.

    `opened` closes it. Raises ConfigError if --transport cuda_ipc cannot be used.
    """
    if writer is None:
        return None
    if isinstance(engine, _HasDeviceArena):
        device = open_cuda_device(config, engine, arena.num_blocks, writer)
    else:
        device = open_host_device(config, engine.layout, arena, writer)
    if device is not None:
        opened.callback(device.close)
    return device


def open_host_device(
    config: NodeConfig, layout: KVLayout, arena: _ArenaParts, writer: ProvableWriter
) -> TransferDevice | None:
    """The stand-in of a node that computes on a CPU: for tests of the transport, not for speed."""
    if config.transport != CUDA_IPC:
        return None
    writer.publish(HOST_DEVICE, NO_DRIVER_FILE)
    log.get_logger("transfer").warning(
        "cuda_ipc without a GPU: KV moves through shared memory, for tests; use shm"
    )
    return HostMemory(
        arena.block_memory,
        arena.num_blocks,
        layout,
        Path(config.segment_dir),
        arena.segment.name,
        writer.name,
    )


def open_cuda_device(
    config: NodeConfig, engine: _HasDeviceArena, num_blocks: int, writer: ProvableWriter
) -> TransferDevice | None:
    """The device memory of a node on a GPU; None if it can neither write nor be written to.

    Tries the fence (fence_self_test.py), which takes half a second. What cannot be used is logged.
    Raises ConfigError if nothing can, and --transport is cuda_ipc.
    """
    from kv_transfer.device.cuda_memory import CudaMemory

    arena, reasons = engine.device_arena, []
    index = arena.device.index or 0
    try:
        _require_no_mps()
        writer.publish(f"cuda {CudaDriver(index).device_uuid()}", Path(UVM_FILE))
    except (UnprovableEnd, CudaError, OSError) as error:
        reasons.append(f"no writes to peers: {error}")
    receives = not (refusal := find_fence_refusal(index, Path(config.segment_dir)))
    if refusal:
        reasons.append(f"no writes of peers: {refusal}")
    memory = None
    if writer.name or receives:
        try:
            memory = CudaMemory(
                arena,
                num_blocks,
                engine.layout,
                writer.name,
                receives=receives,
                void_loads=engine.void_loads,
            )
            memory.export_arena()
            memory.warm_up()
        except (UnmappableSegment, DeviceFailed, CudaError) as error:
            reasons.append(str(error))
            memory = None
    if reasons:
        log.get_logger("transfer").warning("KV from GPU to GPU is limited", reasons=reasons)
    if memory is None and config.transport == CUDA_IPC:
        raise ConfigError(f"transport cuda_ipc cannot be used here: {'; '.join(reasons)}")
    return memory


def find_fence_refusal(index: int, folder: Path) -> str:
    """Why peers may not write to this device: what the self-test found; empty if they may."""
    try:
        _require_no_mps()
        trial = check_fence(index, folder)
    except (FenceFailed, UnprovableEnd) as error:
        return str(error)
    log.get_logger("transfer").info(
        "fence self-test passed", proof_seconds=round(trial.proof_seconds, 3)
    )
    return ""


def _require_no_mps() -> None:
    """Raise UnprovableEnd if CUDA's work may run in the process of an MPS server."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPE_FOLDER))
    try:
        is_running = stat.S_ISFIFO((folder / "control").stat().st_mode)
    except OSError:
        is_running = False
    if is_running:
        raise UnprovableEnd(f"an MPS server listens in {folder}: its kernels outlive its clients")
