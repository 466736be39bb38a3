"""From a device to its kernels: the only place that asks which device it is."""

import importlib

import torch

from kv_kernels.reference.torch_kernels import TorchKernels


def kernels_for(device: torch.device) -> TorchKernels:
    """The hot operations of `device`. Triton is imported only where a GPU runs it."""
    if device.type == "cuda":
        cuda_kernels: TorchKernels = importlib.import_module(
            "kv_kernels.cuda_kernels"
        ).CudaKernels()
        return cuda_kernels
    return TorchKernels()
