"""Memory that torch has not allocated, as CUDA tensors, and pinned memory as the device sees it."""

from typing import Any

import torch


class _CudaMemory:
    """Memory in the form that torch wraps without a copy."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner  # kept alive as long as the tensor
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def view_device_words(address: int, size: int) -> torch.Tensor:
    """`size` bytes of device memory, of this process or opened from another: int64 [size / 8]."""
    device = _find_device(address)
    return torch.as_tensor(_CudaMemory(address, size, None), device=device).view(torch.int64)


def _find_device(address: int) -> torch.device:
    """The device that torch takes an address for; under another one it would copy the memory."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if torch.as_tensor(_CudaMemory(address, 1, None), device=device).data_ptr() == address:
            return device
    raise ValueError(f"no device has memory at {address:#x}")


def view_pinned_words(host: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A copy of a host tensor in pinned memory that kernels of the device read and write."""
    pinned = host.pin_memory()
    return map_pinned(pinned).view(dtype)


def map_pinned(pinned: torch.Tensor) -> torch.Tensor:
    """The bytes of a pinned host tensor as the device sees them: uint8 [bytes], no copy."""
    address = pinned.data_ptr()
    memory = _CudaMemory(address, pinned.nbytes, pinned)
    return torch.as_tensor(memory, device=_find_device(address))
