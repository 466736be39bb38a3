"""Chooses the kernels of a device. Nothing else asks which device it is."""

import importlib

import torch

from kv_kernels.reference.torch_kernels import TorchKernels


def kernels_for(device: torch.device, *, deterministic: bool = False) -> TorchKernels:
    """The kernels for `device`. Triton is imported only if it is a GPU.

    With `deterministic`, what a row computes on a GPU does not depend on the other rows of a step.
    """
    if device.type == "cuda":
        module = importlib.import_module("kv_kernels.cuda_kernels")
        name = "BatchInvariantCudaKernels" if deterministic else "CudaKernels"
        cuda_kernels: TorchKernels = getattr(module, name)()
        return cuda_kernels
    return TorchKernels()
