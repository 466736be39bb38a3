"""Wraps a node's cache segment as a tensor of its device."""

import contextlib
import weakref
from typing import Any

import torch


def memory_as_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory`, writable, as a one-dimensional CPU tensor without a copy."""
    return torch.frombuffer(memory, dtype=dtype)


def synchronize() -> None:
    """Wait until results are in memory. On the CPU they are when a call returns."""


class MemoryPinError(RuntimeError):
    """The driver refuses to pin the memory, for example of a file that is not in a tmpfs."""


class _CudaMapping:
    """Host memory mapped for CUDA, in the form that torch wraps without a copy."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host  # kept alive as long as the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def memory_as_cuda_tensor(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory` as a writable CUDA tensor, pinned and mapped into the GPU's addresses.

    Kernels read and write the segment itself: they see what a peer wrote there, and what they
    compute can be sent from there. The memory stays pinned until the last tensor over it is gone.
    Raises MemoryPinError.
    """
    host = torch.frombuffer(memory, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if code:
        _forget_last_error()
        raise MemoryPinError(
            f"cudaHostRegister of {host.nbytes} bytes: {_cuda_error_text(code)} ({code})"
        )
    mapped = _CudaMapping(host)
    finalizer = weakref.finalize(mapped, _unregister, host)
    finalizer.atexit = False  # the end of the process unpins what is left
    return torch.as_tensor(mapped, device="cuda").view(dtype)


def _forget_last_error() -> None:
    """Otherwise the next launch, of whatever kernel, would report the error as its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _cuda_error_text(code: int) -> str:
    return str(torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(code)))


def _unregister(host: torch.Tensor) -> None:
    """Unpin the memory. Pages left registered would appear in later mappings at their address."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
