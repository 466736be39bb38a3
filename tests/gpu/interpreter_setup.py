"""What is set in Triton's interpreter before it runs kernels in tests."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _cast(data: Any, source: tl.dtype, target: tl.dtype, _: object) -> Any:
    """The bits of `data` in another floating-point type."""
    bits = torch.from_numpy(np.ascontiguousarray(data)).flatten().view(_TORCH_DTYPES[source])
    cast = bits.to(_TORCH_DTYPES[target]).view(torch.uint8).numpy()
    return cast.view(_UNSIGNED[target.primitive_bitwidth // 8]).reshape(data.shape)


_scalar_numpy_dtype = cache(interpreter._get_np_dtype)


def _numpy_dtype(dtype: tl.dtype) -> "np.dtype[Any]":
    """The type of the elements in numpy; the interpreter's own makes a table for each call."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _scalar_numpy_dtype(scalar)


class _LastingPatch:
    """Patches each module of the language for a kernel's first call, and leaves it patched.

    The interpreter patches the language for every call of a kernel and of each function in it, and
    restores it afterwards. That is a third of its time, and no patch depends on the kernel.
    """

    def __init__(self, patch: Callable[[Any], object]) -> None:
        self._patch = patch
        self._patched: set[ModuleType] = set()

    def __call__(self, kernel: Any) -> object:
        used = {
            value
            for value in kernel.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        }
        if not used <= self._patched:
            self._patch(kernel)
            self._patched |= used
        return interpreter._LangPatchScope()  # has nothing to restore


def _share_block_types() -> None:
    """Compute what follows from the shape of a block once for each shape.

    The interpreter does it again for the result of every operation.
    """
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr():  # each kernel argument has its own
            make_type(self, element_ty, shape)
            return
        sizes = (size.value if isinstance(size, tl.constexpr) else size for size in shape)
        key = (element_ty, *sizes)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


def make_dot_batch_invariant() -> None:
    """Let tl.dot sum every row of a tile in the same order, as a GPU does.

    The interpreter multiplies by numpy's BLAS, in which the order depends on a row's place in the
    tile on some CPUs. einsum has one order for all rows.
    """

    def convert_fp8(operand: Any) -> Any:
        """The elements, those of an 8-bit float as float16, which holds them exactly."""
        if operand.dtype.primitive_bitwidth != 8 or not operand.dtype.is_floating():
            return operand.data
        bits = interpreter._convert_float(operand.data, operand.dtype, tl.float16, None)
        return bits.view(np.float16)

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: object, max_imprecise: object
    ) -> Any:
        product = np.einsum(
            "...ik,...kj->...ij", convert_fp8(a), convert_fp8(b), dtype=d.data.dtype
        )
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def prepare_interpreter() -> None:
    """Let torch cast to and from bf16 and e4m3, and leave out what takes time and has no effect.

    The interpreter's own casts round halves up, carry wrongly into the exponent, and lose NaN. Its
    checks for overflow take a third of its time, and are asserted by kernels in debug mode only.
    """
    interpreter._convert_float = _cast
    interpreter._patch_lang = _LastingPatch(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_dtype
    _share_block_types()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
