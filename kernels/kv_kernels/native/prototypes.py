"""The functions of the native library and their types, as src/kv_native.h declares them."""

import ctypes

ABI_VERSION = 5  # KVN_ABI_VERSION

# name -> (type of the result, types of the arguments)
PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvn_abi_version": (ctypes.c_int32, ()),
    "kvn_build_id": (ctypes.c_char_p, ()),
    "kvn_cpu_features": (ctypes.c_uint32, ()),
    "kvn_limit_cpu_features": (None, (ctypes.c_uint32,)),
    "kvn_create": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int32)),
    "kvn_destroy": (None, (ctypes.c_void_p,)),
    "kvn_bind_cache": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "kvn_share_cores": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32),
    ),
    "kvn_begin_step": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p)),
    "kvn_end_step": (None, (ctypes.c_void_p,)),
    "kvn_run_halves": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p),
    ),
    "kvn_compute_logits": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ),
    "kvn_pick_tokens": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    ),
    "kvn_multiply": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    ),
    "kvn_pack": (ctypes.c_int32, (ctypes.c_void_p,)),
    "kvn_copy_slabs": (
        ctypes.c_uint64,
        (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        ),
    ),
    "kvn_read_two_streams": (ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)),
}
