"""From a device to its kernels: the only place that asks which device it is."""

import torch

from kv_kernels.torch_kernels import TorchKernels


def kernels_for(device: torch.device) -> TorchKernels:
    """The hot operations of `device`."""
    return TorchKernels()
