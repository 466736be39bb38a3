"""Copies slabs and hashes them in the same pass, by the native library and without Python's lock.

With numpy a slab that is sent is read four times (copied, hashed, copied again, hashed again) and
its copy is a new allocation; and between two calls a thread that launches kernels has to wait for
the lock. The result is the XXH3 of the slabs in their order, as xxhash computes it.
"""

from collections.abc import Callable
from functools import cache

from kv_kernels.native.native_library import NativeLibrary, load_library

_STRIPE_BYTES = 64  # slabs are whole stripes of XXH3
_MIN_BYTES = 241  # shorter inputs are hashed in another way

# (source, source_rows, target, target_rows, slabs, slab_bytes) -> hash; addresses, None for none
CopySlabs = Callable[[int, int | None, int | None, int | None, int, int], int]


def find_native_copy(num_slabs: int, slab_bytes: int) -> CopySlabs | None:
    """What copies and hashes so many slabs; None if numpy and xxhash have to do it."""
    if slab_bytes % _STRIPE_BYTES or num_slabs * slab_bytes < _MIN_BYTES:
        return None
    return _load_function()


@cache
def _load_function() -> CopySlabs | None:
    library = load_library()
    if not isinstance(library, NativeLibrary):
        return None
    function: CopySlabs = library.functions.kvn_copy_slabs
    return function
