"""Chooses the kernels of a device. Nothing else asks which device it is."""

import importlib

import torch

from kv_kernels.reference.torch_kernels import TorchKernels


def kernels_for(device: torch.device) -> TorchKernels:
    """The kernels for `device`. Triton is imported only if it is a GPU."""
    if device.type == "cuda":
        cuda_kernels: TorchKernels = importlib.import_module(
            "kv_kernels.cuda_kernels"
        ).CudaKernels()
        return cuda_kernels
    return TorchKernels()
