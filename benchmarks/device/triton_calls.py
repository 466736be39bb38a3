"""Calls of the Triton kernels over caches and inputs of a given shape, for measurements."""

from dataclasses import dataclass

import torch

from benchmarks.device.timing import Call
from kv_kernels.reference.paged_attention import PagedCache
from kv_kernels.triton import layer_ops
from kv_kernels.triton.prefill_attention import PrefillChunk, attend_chunks, list_query_tiles
from kv_kernels.triton.split_decode import SplitDecode
from node_engine.model.config.rope import compute_angles
from node_engine.model.gpu.fused_transformer import choose_splits


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of a model, and the block size of its cache."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def make_cache(self, device: torch.device, blocks: int) -> PagedCache:
        """A cache of one layer with random contents."""
        shape = (blocks, 1, 2, self.kv_heads, self.block_size, self.dim)
        return PagedCache.from_arena(self.make_values(device, *shape))

    def make_values(self, device: torch.device, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=device).normal_()

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize


def plan_decode(sizes: AttentionSizes, device: torch.device, batch: int, context: int) -> Call:
    """Attention of one query for each of `batch` sequences, whose blocks are scattered."""
    blocks = -(-context // sizes.block_size)
    cache = sizes.make_cache(device, batch * blocks)
    query = sizes.make_values(device, batch, sizes.heads, sizes.dim)
    out = torch.empty_like(query)
    decode = SplitDecode.allocate(
        torch.randperm(batch * blocks).to(device, torch.int32),
        torch.arange(0, batch * blocks, blocks, dtype=torch.int32, device=device),
        torch.full((batch,), context, dtype=torch.int32, device=device),
        sizes.heads,
        sizes.dim,
        choose_splits(batch, sizes.kv_heads),
    )
    return lambda: decode.attend(query, cache, 0, None, out)


def plan_prefill(sizes: AttentionSizes, device: torch.device, tokens: int) -> Call:
    """Causal attention of one prompt, in one chunk."""
    blocks = -(-tokens // sizes.block_size)
    cache = sizes.make_cache(device, blocks)
    query = sizes.make_values(device, tokens, sizes.heads, sizes.dim)
    out = torch.empty_like(query)
    tables = torch.randperm(blocks).to(device, torch.int32)
    tiles = torch.from_numpy(list_query_tiles([PrefillChunk(0, tokens, 0, 0)])).to(device)
    return lambda: attend_chunks(query, cache, 0, tables, tiles, None, out)


def count_prefill_operations(sizes: AttentionSizes, tokens: int) -> int:
    """Operations of causal attention of one prompt, in one layer."""
    return 4 * sizes.heads * sizes.dim * (tokens * (tokens + 1) // 2)


def plan_rotate_and_write(sizes: AttentionSizes, device: torch.device, tokens: int) -> Call:
    """Rotation of queries and keys, and the write of keys and values to scattered slots."""
    cache = sizes.make_cache(device, -(-tokens // sizes.block_size))
    qkv = sizes.make_values(device, tokens, sizes.heads + 2 * sizes.kv_heads, sizes.dim)
    cos, sin = compute_angles(
        torch.rand(sizes.dim // 2, device=device), torch.arange(tokens, device=device), qkv.dtype
    )
    slots = torch.randperm(len(cache.arena) * sizes.block_size)[:tokens].to(device, torch.int32)
    query = torch.empty_like(qkv[:, : sizes.heads])
    return lambda: layer_ops.rotate_and_write_kv(qkv, cos, sin, None, 0.0, cache, 0, slots, query)


def count_rotated_bytes(sizes: AttentionSizes, tokens: int) -> int:
    """Bytes that the rotation and the write read and write."""
    values = (sizes.heads + 2 * sizes.kv_heads) * sizes.dim
    return 2 * tokens * values * sizes.dtype.itemsize
