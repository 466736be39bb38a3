"""The kernels of an NVIDIA GPU: Triton where it matters, torch's own CUDA operators elsewhere."""

import torch

from kv_kernels import fused_prefill as causal_chunk
from kv_kernels.reference import host_memory, linear
from kv_kernels.reference.torch_kernels import TorchKernels
from kv_kernels.triton import decode_attention as triton_decode
from kv_kernels.triton import kv_write as triton_write


class CudaKernels(TorchKernels):
    memory_as_tensor = staticmethod(host_memory.memory_as_cuda_tensor)
    synchronize = staticmethod(torch.cuda.synchronize)
    make_linear = staticmethod(linear.PlainLinear)
    write_kv = staticmethod(triton_write.write_kv)
    plan_decode = staticmethod(triton_decode.plan_decode)
    plan_prefill = staticmethod(causal_chunk.plan_fused_prefill)

    def __init__(self) -> None:
        # cuDNN compiles its attention anew for every pair of lengths, for 44 ms at the first call
        # on an H100: chunks of a running server hardly ever have the same pair twice.
        torch.backends.cuda.enable_cudnn_sdp(False)
