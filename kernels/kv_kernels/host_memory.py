"""A node's cache segment as a tensor of its device."""

from typing import Any

import torch


def adopt(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory`, writable, as a one-dimensional CPU tensor without a copy."""
    return torch.frombuffer(memory, dtype=dtype)


def synchronize() -> None:
    """Wait until what was computed is in memory: on the CPU it is when the call returns."""


class _Mapped:
    """Host memory as CUDA sees it, in the form that torch adopts without a copy."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host  # kept alive as long as the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def adopt_cuda(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of `memory`, writable, pinned and mapped into the GPU's address space: kernels read and write
    the segment itself, so that what a peer wrote there is seen, and what is computed can be sent from there.

    Raises RuntimeError when the driver refuses to pin the memory.
    """
    host = torch.frombuffer(memory, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if code != torch.cuda.cudart().cudaError.success:
        raise RuntimeError(f"cudaHostRegister of {host.nbytes} bytes: {code}")
    return torch.as_tensor(_Mapped(host), device="cuda").view(dtype)
