"""The structures of src/kv_model.h for ctypes."""

import ctypes
from enum import IntEnum

PACKED_FORMAT_VERSION = 3  # counts up whenever packed weights lie otherwise in memory

Pointer = ctypes.c_void_p
Int = ctypes.c_int64
Flag = ctypes.c_int32


class Format(IntEnum):
    """How the numbers of a matrix or of the KV cache are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    COMPACT_BFLOAT16 = 3  # of a matrix: bfloat16 without loss in 12 bits


class Status(IntEnum):
    """What a call returns."""

    OK = 0
    OUT_OF_MEMORY = 1
    BAD_ARGUMENT = 2
    INCOMPRESSIBLE = 3


class KvnLinear(ctypes.Structure):
    """KvnLinear."""

    _fields_ = (
        ("weights", Pointer),
        ("bias", Pointer),
        ("scales", Pointer),
        ("channel_sums", Pointer),
        ("inputs", Int),
        ("outputs", Int),
        ("format", Flag),
        ("is_gated", Flag),
    )


class KvnLayer(ctypes.Structure):
    """KvnLayer."""

    _fields_ = (
        ("attention_norm", Pointer),
        ("qk_norm", Pointer),
        ("mlp_norm", Pointer),
        ("qkv", KvnLinear),
        ("output", KvnLinear),
        ("gate_up", KvnLinear),
        ("down", KvnLinear),
        ("window", Int),
    )


class KvnModel(ctypes.Structure):
    """KvnModel."""

    _fields_ = (
        ("format", Flag),
        ("num_layers", Flag),
        ("hidden", Int),
        ("intermediate", Int),
        ("heads", Int),
        ("kv_heads", Int),
        ("head_dim", Int),
        ("vocab", Int),
        ("norm_eps", ctypes.c_float),
        ("frequencies", Pointer),
        ("embedding", Pointer),
        ("final_norm", Pointer),
        ("layers", ctypes.POINTER(KvnLayer)),
        ("head", KvnLinear),
    )


class KvnCache(ctypes.Structure):
    """KvnCache."""

    _fields_ = (("arena", Pointer), ("num_blocks", Int), ("block_size", Int), ("format", Flag))


class KvnStep(ctypes.Structure):
    """KvnStep."""

    _fields_ = (
        ("token_ids", Pointer),
        ("num_rows", Int),
        ("slices", Pointer),
        ("num_slices", Int),
        ("block_tables", Pointer),
        ("num_table_entries", Int),
        ("sampled_rows", Pointer),
        ("num_sampled", Int),
    )


class KvnDraw(ctypes.Structure):
    """KvnDraw."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", Int),
        ("temperature", ctypes.c_float),
        ("min_logit", ctypes.c_float),
        ("position", ctypes.c_uint32),
        ("choice", ctypes.c_uint32),
    )


class KvnPack(ctypes.Structure):
    """KvnPack."""

    _fields_ = (
        ("weight", Pointer),
        ("outputs", Int),
        ("inputs", Int),
        ("source_format", Flag),
        ("format", Flag),
        ("first_panel", Int),
        ("panel_step", Int),
        ("packed", Pointer),
        ("scales", Pointer),
        ("channel_sums", Pointer),
    )
