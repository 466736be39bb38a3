"""The kernels of an NVIDIA GPU: Triton where it matters, torch's own CUDA operators elsewhere."""

import torch

from kv_kernels import fused_prefill
from kv_kernels.reference import host_memory, linear
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton import decode_attention, kv_write


class CudaKernels(TorchKernels):
    """Overrides those operations that are faster in another way on a GPU."""

    memory_as_tensor = staticmethod(host_memory.memory_as_cuda_tensor)
    synchronize = staticmethod(torch.cuda.synchronize)
    make_linear = staticmethod(linear.PlainLinear)
    write_kv = staticmethod(kv_write.write_kv)
    plan_decode = staticmethod(decode_attention.plan_decode)
    plan_prefill = staticmethod(fused_prefill.plan_fused_prefill)

    def __init__(self) -> None:
        # cuDNN compiles its attention again for every pair of lengths: 44 ms at the first call on
        # an H100. The chunks of a running server hardly ever have the same pair twice.
        torch.backends.cuda.enable_cudnn_sdp(False)
