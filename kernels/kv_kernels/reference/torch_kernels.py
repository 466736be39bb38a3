"""The kernels in plain torch: the reference of every other implementation, and what a CPU runs."""

from kv_kernels.reference import elementwise, host_memory, linear
from kv_kernels.reference import paged_attention as attention
from kv_kernels.reference import paged_attention as paged_cache


class TorchKernels:
    """A table of operations. Each function documents its shapes; devices override single ones."""

    memory_as_tensor = staticmethod(host_memory.memory_as_tensor)
    synchronize = staticmethod(host_memory.synchronize)
    make_rms_norm = elementwise.RMSNorm
    rotary_ = staticmethod(elementwise.rotary_)
    silu_mul = staticmethod(elementwise.silu_mul)
    make_linear = staticmethod(linear.make_cpu_linear)
    write_kv = staticmethod(paged_cache.write_kv)
    clear_blocks = staticmethod(paged_cache.clear_blocks)
    copy_blocks = staticmethod(paged_cache.copy_blocks)
    gather_slabs = staticmethod(paged_cache.gather_slabs)
    scatter_slabs = staticmethod(paged_cache.scatter_slabs)
    plan_decode = staticmethod(attention.plan_decode)
    plan_prefill = staticmethod(attention.plan_prefill)
    causal_mask = staticmethod(attention.causal_mask)
    window_mask = staticmethod(attention.window_mask)
