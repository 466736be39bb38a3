"""The operations that an engine on an NVIDIA GPU shares with the one on CPUs.

Attention, the layers' elementwise operations and sampling have kernels of their own in `triton/`,
which `node_engine/model/gpu` calls directly.
"""

import torch

from kv_kernels.reference import host_memory
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton.batch_invariant_linear import BatchInvariantLinear
from kv_kernels.triton.row_linear import CudaLinear


class CudaKernels(TorchKernels):
    """Overrides those operations that differ on a GPU."""

    memory_as_tensor = staticmethod(host_memory.memory_as_cuda_tensor)
    synchronize = staticmethod(torch.cuda.synchronize)
    make_linear = CudaLinear


class BatchInvariantCudaKernels(CudaKernels):
    """What a row computes does not depend on the other rows of a step."""

    make_linear = BatchInvariantLinear  # type: ignore[assignment]
