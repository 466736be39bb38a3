"""A node's cache segment as a tensor of its device."""

import weakref
from typing import Any

import torch


def memory_as_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory`, writable, as a one-dimensional CPU tensor without a copy."""
    return torch.frombuffer(memory, dtype=dtype)


def synchronize() -> None:
    """Wait until what was computed is in memory: on the CPU it is when the call returns."""


class MemoryPinError(RuntimeError):
    """The driver refuses to pin it, as memory of a file that is in no tmpfs."""


class _CudaMapping:
    """Host memory as CUDA sees it, in the form that torch adopts without a copy."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host  # kept alive as long as the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def memory_as_cuda_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory`, writable, pinned and mapped into the GPU's address space: kernels read
    and write the segment itself, so that what a peer wrote there is seen, and what is computed can
    be sent from there.

    The memory stays pinned until the last tensor over it is gone. Raises CannotPin.
    """
    host = torch.frombuffer(memory, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        raise MemoryPinError(
            f"cudaHostRegister of {host.nbytes} bytes: {_cuda_error_text(code)} ({code})"
        )
    mapped = _CudaMapping(host)
    weakref.finalize(
        mapped, _unregister, host
    ).atexit = False  # the end of the process unpins what is left
    return torch.as_tensor(mapped, device="cuda").view(dtype)


def _cuda_error_text(code: int) -> str:
    return str(torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(code)))


def _unregister(host: torch.Tensor) -> None:
    """Pages that stayed registered would be seen through any later mapping at their address."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
