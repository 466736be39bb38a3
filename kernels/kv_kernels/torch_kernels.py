"""The kernels as plain torch: the oracle of every other implementation, and the path of the CPU."""

from kv_kernels import attention, cache_ops, elementwise, linear


class TorchKernels:
    """Shapes stand at the functions. Whatever a device does better, its own class overrides."""

    rms_norm = staticmethod(elementwise.rms_norm)
    rotary = staticmethod(elementwise.rotary)
    silu_mul = staticmethod(elementwise.silu_mul)
    linear = staticmethod(linear.cpu_linear)
    write_kv = staticmethod(cache_ops.write_kv)
    clear_blocks = staticmethod(cache_ops.clear_blocks)
    copy_blocks = staticmethod(cache_ops.copy_blocks)
    gather_slabs = staticmethod(cache_ops.gather_slabs)
    scatter_slabs = staticmethod(cache_ops.scatter_slabs)
    plan_decode = staticmethod(attention.plan_decode)
    plan_prefill = staticmethod(attention.plan_prefill)
    causal_mask = staticmethod(attention.causal_mask)
