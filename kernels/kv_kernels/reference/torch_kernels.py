"""The kernels in plain torch: the reference of every other implementation, and what a CPU runs."""

from kv_kernels.reference import (
    elementwise,
    fp8,
    host_memory,
    int8_linear,
    linear,
    paged_attention,
)


class TorchKernels:
    """A table of operations. Each function documents its shapes; devices override single ones."""

    memory_as_tensor = staticmethod(host_memory.memory_as_tensor)
    synchronize = staticmethod(host_memory.synchronize)
    make_rms_norm = elementwise.RMSNorm
    rotary_ = staticmethod(elementwise.rotary_)
    silu_mul = staticmethod(elementwise.silu_mul)
    make_linear = staticmethod(linear.make_cpu_linear)
    make_fp8_linear: type[fp8.Fp8Linear] = fp8.Fp8Linear
    make_int8_linear: type[int8_linear.Int8Linear] = int8_linear.Int8Linear
    write_kv = staticmethod(paged_attention.write_kv)
    clear_blocks = staticmethod(paged_attention.clear_blocks)
    copy_blocks = staticmethod(paged_attention.copy_blocks)
    gather_slabs = staticmethod(paged_attention.gather_slabs)
    scatter_slabs = staticmethod(paged_attention.scatter_slabs)
    plan_decode = staticmethod(paged_attention.plan_decode)
    plan_prefill = staticmethod(paged_attention.plan_prefill)
    causal_mask = staticmethod(paged_attention.causal_mask)
    window_mask = staticmethod(paged_attention.window_mask)
